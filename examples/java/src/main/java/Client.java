import com.google.protobuf.ByteString;
import com.google.protobuf.Duration;
import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import java.io.File;
import java.io.IOException;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;
import timer.v1.AckRequest;
import timer.v1.AckResponse;
import timer.v1.AckResult;
import timer.v1.ConsumeServiceGrpc;
import timer.v1.ConsumeServiceGrpc.ConsumeServiceBlockingStub;
import timer.v1.DeliveredMessage;
import timer.v1.ReceiveRequest;
import timer.v1.ReceiveResponse;
import timer.v1.ScheduleTimerRequest;
import timer.v1.TimerServiceGrpc;
import timer.v1.TimerServiceGrpc.TimerServiceBlockingStub;

/**
 * Schedules COUNT timers, receives and acks them, and continues through failovers of the cluster.
 *
 * <p>mvn -q compile exec:java -Dexec.args="HOST:PORT,HOST:PORT,… TOPIC GROUP COUNT"
 *
 * <p>Prints "scheduled N" when N timers are scheduled, and "acked N" after N messages are acked. With
 * TLS, the variables TIMERCTL_TLS_CA, TIMERCTL_TLS_CERT and TIMERCTL_TLS_KEY name the files.
 */
public final class Client {
  private static final int CALL_S = 10; // the deadline of one attempt
  private static final int GIVE_UP_S = 60; // of all attempts of a call
  private static final int ANSWER_BYTES_MAX = 32 << 20; // a payload may have 16 MiB
  private static final Set<Status.Code> PASSING =
      Set.of(
          Status.Code.UNAVAILABLE, // no leader, or the node is down
          Status.Code.DEADLINE_EXCEEDED, // outcome unknown
          Status.Code.ABORTED, // the leader changed: outcome unknown
          Status.Code.RESOURCE_EXHAUSTED, // busy
          Status.Code.FAILED_PRECONDITION); // no leader is known

  private final List<ManagedChannel> nodes = new ArrayList<>();
  private final String topic;

  private Client(String addresses, String topic) throws IOException {
    this.topic = topic;
    for (String address : addresses.split(",")) {
      nodes.add(
          Grpc.newChannelBuilder(address, credentials())
              .maxInboundMessageSize(ANSWER_BYTES_MAX)
              .build());
    }
  }

  private static ChannelCredentials credentials() throws IOException {
    String ca = System.getenv("TIMERCTL_TLS_CA");
    if (ca == null) {
      return InsecureChannelCredentials.create();
    }
    return TlsChannelCredentials.newBuilder()
        .trustManager(new File(ca))
        .keyManager(
            new File(System.getenv("TIMERCTL_TLS_CERT")), new File(System.getenv("TIMERCTL_TLS_KEY")))
        .build();
  }

  /** Makes a call that may be repeated: at one node, and at the next one after a failure that may pass. */
  private <T> T call(Function<ManagedChannel, T> method) throws InterruptedException {
    long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(GIVE_UP_S);
    for (int at = 0; ; at++) {
      try {
        return method.apply(nodes.get(at % nodes.size()));
      } catch (StatusRuntimeException error) {
        if (!PASSING.contains(error.getStatus().getCode()) || System.nanoTime() > end) {
          throw error;
        }
        Thread.sleep(200);
      }
    }
  }

  private static TimerServiceBlockingStub timers(ManagedChannel node) {
    return TimerServiceGrpc.newBlockingStub(node).withDeadlineAfter(CALL_S, TimeUnit.SECONDS);
  }

  private static ConsumeServiceBlockingStub consuming(ManagedChannel node) {
    return ConsumeServiceGrpc.newBlockingStub(node).withDeadlineAfter(CALL_S, TimeUnit.SECONDS);
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
      call(node -> timers(node).scheduleTimer(request));
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
      ReceiveResponse received = call(node -> consuming(node).receive(request));
      if (received.getMessagesCount() == 0) {
        continue;
      }
      AckRequest.Builder ack = AckRequest.newBuilder().setTopic(topic).setGroup(group);
      for (DeliveredMessage message : received.getMessagesList()) {
        ack.addLeases(message.getLease());
      }
      AckResponse acked = call(node -> consuming(node).ack(ack.build()));
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
      client.nodes.forEach(ManagedChannel::shutdownNow);
    }
  }
}
