import io.grpc.Attributes;
import io.grpc.ChannelCredentials;
import io.grpc.EquivalentAddressGroup;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.NameResolver;
import io.grpc.NameResolverProvider;
import io.grpc.NameResolverRegistry;
import io.grpc.Status;
import io.grpc.StatusOr;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.ProtoUtils;
import java.io.File;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.URI;
import java.net.URISyntaxException;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;

/** Connects to a cluster, and tells which failed calls to repeat. */
final class Nodes {
  private static final int GIVE_UP_S = 60; // of all attempts of a call
  private static final int PAUSE_MS = 200;
  private static final int ANSWER_BYTES_MAX = 32 << 20; // a payload has 4 MiB at most by default

  /** Calls go to the node that serves: the leader. Needs grpc-services. */
  private static final Map<String, ?> LEADER_ONLY =
      Map.of(
          "loadBalancingConfig", List.of(Map.of("round_robin", Map.of())),
          "healthCheckConfig", Map.of("serviceName", "timer.v1.TimerService"));

  private static final Metadata.Key<timer.v1.Error> FAILURE =
      Metadata.Key.of(
          "timer-error-bin", ProtoUtils.metadataMarshaller(timer.v1.Error.getDefaultInstance()));

  static {
    NameResolverRegistry.getDefaultRegistry().register(new AddressLists());
  }

  private Nodes() {}

  /**
   * Returns a channel to the leader among the nodes: "HOST:PORT,HOST:PORT,…". With TLS, the variables
   * TIMERCTL_TLS_CA, TIMERCTL_TLS_CERT and TIMERCTL_TLS_KEY name the files.
   */
  static ManagedChannel connect(String addresses) throws IOException {
    return Grpc.newChannelBuilder(target(addresses), credentials())
        .defaultServiceConfig(LEADER_ONLY)
        .keepAliveTime(10, TimeUnit.SECONDS)
        .keepAliveTimeout(5, TimeUnit.SECONDS)
        .maxInboundMessageSize(ANSWER_BYTES_MAX)
        .build();
  }

  private static String target(String addresses) {
    try {
      return new URI(AddressLists.SCHEME, null, "/" + addresses, null).toString();
    } catch (URISyntaxException error) {
      throw new IllegalArgumentException(addresses, error);
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

  /** Makes a call that may be repeated, until it succeeds or fails for good. */
  static <T> T call(Supplier<T> method) throws InterruptedException {
    long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(GIVE_UP_S);
    while (true) {
      try {
        return method.get();
      } catch (StatusRuntimeException error) {
        timer.v1.Error failure = failure(error);
        if (!passes(error, failure) || System.nanoTime() > end) {
          throw error;
        }
        Thread.sleep(failure == null ? PAUSE_MS : Math.max(PAUSE_MS, failure.getRetryAfterMs()));
      }
    }
  }

  /** Returns the cluster's own error. Null: gRPC failed, such as a connection. */
  static timer.v1.Error failure(StatusRuntimeException error) {
    return error.getTrailers() == null ? null : error.getTrailers().get(FAILURE);
  }

  private static boolean passes(StatusRuntimeException error, timer.v1.Error failure) {
    Status.Code code = error.getStatus().getCode();
    return failure != null
        ? failure.getRetryable()
        : code == Status.Code.UNAVAILABLE || code == Status.Code.DEADLINE_EXCEEDED;
  }

  /** Resolves timers:/HOST:PORT,HOST:PORT,… to these addresses. Serves the channels of all clusters. */
  private static final class AddressLists extends NameResolverProvider {
    static final String SCHEME = "timers";

    private static List<EquivalentAddressGroup> nodes(String addresses) {
      List<EquivalentAddressGroup> nodes = new ArrayList<>();
      for (String address : addresses.split(",")) {
        URI uri = URI.create(SCHEME + "://" + address);
        Attributes certified = // with TLS: the name in the node's certificate
            Attributes.newBuilder()
                .set(EquivalentAddressGroup.ATTR_AUTHORITY_OVERRIDE, uri.getHost())
                .build();
        nodes.add(
            new EquivalentAddressGroup(
                new InetSocketAddress(uri.getHost(), uri.getPort()), certified));
      }
      return nodes;
    }

    @Override
    public NameResolver newNameResolver(URI target, NameResolver.Args args) {
      if (!SCHEME.equals(target.getScheme())) {
        return null; // of another provider
      }
      List<EquivalentAddressGroup> nodes = nodes(target.getPath().substring(1));
      return new NameResolver() {
        @Override
        public String getServiceAuthority() {
          return "nodes";
        }

        @Override
        public void start(Listener2 listener) {
          listener.onResult(
              ResolutionResult.newBuilder().setAddressesOrError(StatusOr.fromValue(nodes)).build());
        }

        @Override
        public void shutdown() {}
      };
    }

    @Override
    public String getDefaultScheme() {
      return SCHEME;
    }

    @Override
    protected boolean isAvailable() {
      return true;
    }

    @Override
    protected int priority() {
      return 5;
    }
  }
}
