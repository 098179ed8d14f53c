// Package nodes connects to a cluster, and tells which failed calls to repeat.
package nodes

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/health" // calls go to the node that serves: the leader
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	pb "timers/timerv1"
)

const (
	callTime = 10 * time.Second // the deadline of one attempt
	giveUp   = 60 * time.Second // of all attempts of a call
	pause    = 200 * time.Millisecond

	answerBytesMax = 32 << 20 // a payload has 4 MiB at most by default
	leaderOnly     = `{"loadBalancingConfig": [{"round_robin": {}}],
		"healthCheckConfig": {"serviceName": "timer.v1.TimerService"}}`
)

// Connect returns a connection to the leader among the nodes: "HOST:PORT,HOST:PORT,…". With TLS, the
// variables TIMERCTL_TLS_CA, TIMERCTL_TLS_CERT and TIMERCTL_TLS_KEY name the files.
func Connect(addresses string) (*grpc.ClientConn, error) {
	secured, err := transport()
	if err != nil {
		return nil, err
	}
	var nodes resolver.State
	for address := range strings.SplitSeq(addresses, ",") {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		nodes.Addresses = append(nodes.Addresses, resolver.Address{Addr: address, ServerName: host})
	}
	list := manual.NewBuilderWithScheme("timers")
	list.InitialState(nodes)
	return grpc.NewClient("timers:///nodes",
		grpc.WithResolvers(list),
		grpc.WithTransportCredentials(secured),
		grpc.WithDefaultServiceConfig(leaderOnly),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(answerBytesMax)))
}

func transport() (credentials.TransportCredentials, error) {
	ca := os.Getenv("TIMERCTL_TLS_CA")
	if ca == "" {
		return insecure.NewCredentials(), nil
	}
	pem, err := os.ReadFile(ca)
	if err != nil {
		return nil, err
	}
	authorities := x509.NewCertPool()
	if !authorities.AppendCertsFromPEM(pem) {
		return nil, errors.New(ca + " has no certificate")
	}
	own, err := tls.LoadX509KeyPair(os.Getenv("TIMERCTL_TLS_CERT"), os.Getenv("TIMERCTL_TLS_KEY"))
	if err != nil {
		return nil, err
	}
	return credentials.NewTLS(&tls.Config{RootCAs: authorities, Certificates: []tls.Certificate{own}}), nil
}

// Failure returns the cluster's own error in the error of a call. Nil: gRPC failed, such as a
// connection.
func Failure(err error) *pb.Error {
	for _, detail := range status.Convert(err).Details() {
		if failure, ok := detail.(*pb.Error); ok {
			return failure
		}
	}
	return nil
}

// Passes returns whether a request may succeed later, and the least pause before it.
func Passes(err error) (bool, time.Duration) {
	if failure := Failure(err); failure != nil {
		wait := time.Duration(failure.RetryAfterMs) * time.Millisecond
		return failure.Retryable, max(wait, pause)
	}
	code := status.Code(err)
	return code == codes.Unavailable || code == codes.DeadlineExceeded, pause
}

// Call makes a call that may be repeated, until it succeeds or fails for good.
func Call[T any](method func(context.Context) (T, error)) (T, error) {
	end := time.Now().Add(giveUp)
	for {
		ctx, cancel := context.WithTimeout(context.Background(), callTime)
		answer, err := method(ctx)
		cancel()
		passes, wait := Passes(err)
		if err == nil || !passes || time.Now().After(end) {
			return answer, err
		}
		time.Sleep(wait)
	}
}
