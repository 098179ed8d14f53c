import com.google.protobuf.ByteString;
import com.google.protobuf.Duration;
import io.grpc.ManagedChannel;
import java.io.IOException;
import java.util.HashSet;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import timer.v1.AckRequest;
import timer.v1.AckResponse;
import timer.v1.AckResult;
import timer.v1.ConsumeServiceGrpc;
import timer.v1.ConsumeServiceGrpc.ConsumeServiceBlockingStub;
import timer.v1.DeliveredMessage;
import timer.v1.ReceiveRequest;
import timer.v1.ReceiveResponse;
import timer.v1.ScheduleTimerRequest;
import timer.v1.ScheduleTimerResponse;
import timer.v1.TimerServiceGrpc;
import timer.v1.TimerServiceGrpc.TimerServiceBlockingStub;

/**
 * Schedules COUNT timers, receives and acks them, and continues through failovers of the cluster.
 *
 * <p>mvn -q compile exec:java -Dexec.args="HOST:PORT,HOST:PORT,… TOPIC GROUP COUNT"
 *
 * <p>Prints "scheduled N" when N timers are scheduled, and "acked N" after N messages are acked.
 */
public final class Client {
  private static final int CALL_S = 10; // the deadline of one attempt

  private final ManagedChannel nodes;
  private final String topic;

  private Client(String addresses, String topic) throws IOException {
    this.nodes = Nodes.connect(addresses);
    this.topic = topic;
  }

  private TimerServiceBlockingStub timers() {
    return TimerServiceGrpc.newBlockingStub(nodes).withDeadlineAfter(CALL_S, TimeUnit.SECONDS);
  }

  private ConsumeServiceBlockingStub consuming() {
    return ConsumeServiceGrpc.newBlockingStub(nodes).withDeadlineAfter(CALL_S, TimeUnit.SECONDS);
  }

  private void schedule(int count) throws InterruptedException {
    for (int n = 0; n < count; n++) {
      ScheduleTimerRequest request =
          ScheduleTimerRequest.newBuilder()
              .setTopic(topic)
              .setPayload(ByteString.copyFromUtf8("timer " + n))
              .putAllHeaders(Map.of("language", "java"))
              .setDelay(Duration.newBuilder().setSeconds(1))
              .setRequestId(UUID.randomUUID().toString()) // a repetition schedules nothing more
              .build();
      ScheduleTimerResponse answer = Nodes.call(() -> timers().scheduleTimer(request));
      if (answer.getTimerId().isEmpty()) { // a conflict of keys is no error
        throw new IllegalStateException("not scheduled: " + answer.getResult());
      }
      System.out.println("scheduled " + (n + 1));
    }
  }

  private void consume(String group, int count) throws InterruptedException {
    ReceiveRequest request =
        ReceiveRequest.newBuilder()
            .setTopic(topic)
            .setGroup(group)
            .setMaxMessages(16)
            .setWaitMs(2_000)
            .setRows(true)
            .build();
    Set<ByteString> seen = new HashSet<>(); // messages may come again: each counts once
    while (seen.size() < count) {
      ReceiveResponse received = Nodes.call(() -> consuming().receive(request));
      if (received.getMessagesCount() == 0) {
        continue;
      }
      AckRequest.Builder ack = AckRequest.newBuilder().setTopic(topic).setGroup(group);
      for (DeliveredMessage message : received.getMessagesList()) {
        ack.addLeases(message.getLease());
      }
      AckResponse acked = Nodes.call(() -> consuming().ack(ack.build()));
      for (int at = 0; at < acked.getResultsCount(); at++) {
        AckResult result = acked.getResults(at);
        if (result == AckResult.ACK_RESULT_ACKED || result == AckResult.ACK_RESULT_ALREADY_ACKED) {
          seen.add(received.getMessages(at).getPayload());
        }
      }
      System.out.println("acked " + seen.size());
    }
  }

  private static CompletableFuture<Void> begun(Step step) {
    return CompletableFuture.runAsync(
        () -> {
          try {
            step.run();
          } catch (InterruptedException error) {
            throw new IllegalStateException(error);
          }
        });
  }

  private interface Step {
    void run() throws InterruptedException;
  }

  public static void main(String[] args) throws IOException {
    if (args.length != 4) {
      System.err.println("usage: HOST:PORT,… TOPIC GROUP COUNT");
      System.exit(2);
    }
    Client client = new Client(args[0], args[1]);
    int count = Integer.parseInt(args[3]);
    try {
      CompletableFuture.allOf(
              begun(() -> client.schedule(count)), begun(() -> client.consume(args[2], count)))
          .join();
    } finally {
      client.nodes.shutdownNow();
    }
  }
}
