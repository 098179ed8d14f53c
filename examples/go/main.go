// Schedules COUNT timers, receives and acks them, and continues through failovers of the cluster.
//
//	go run . HOST:PORT,HOST:PORT,… TOPIC GROUP COUNT
//
// Prints "scheduled N" when N timers are scheduled, and "acked N" after N messages are acked. With
// TLS, the variables TIMERCTL_TLS_CA, TIMERCTL_TLS_CERT and TIMERCTL_TLS_KEY name the files.
package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "timers/timerv1"
)

const (
	callTime = 10 * time.Second // the deadline of one attempt
	giveUp   = 60 * time.Second // of all attempts of a call

	answerBytesMax = 32 << 20 // a payload may have 16 MiB
)

type node struct {
	timers    pb.TimerServiceClient
	consuming pb.ConsumeServiceClient
}

type cluster []node

// transport returns the credentials for TLS, if its variables are set.
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

// connect returns the nodes with the given addresses.
func connect(addresses []string) (cluster, error) {
	secured, err := transport()
	if err != nil {
		return nil, err
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(secured),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(answerBytesMax)),
	}
	var nodes cluster
	for _, address := range addresses {
		connection, err := grpc.NewClient(address, options...)
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, node{pb.NewTimerServiceClient(connection), pb.NewConsumeServiceClient(connection)})
	}
	return nodes, nil
}

// passes returns whether a request may succeed later, at this node or another one.
func passes(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Aborted, codes.ResourceExhausted,
		codes.FailedPrecondition:
		return true
	}
	return false
}

// call makes a call that may be repeated: at one node, and at the next one after a failure that may pass.
func call[T any](nodes cluster, method func(context.Context, node) (T, error)) (T, error) {
	end := time.Now().Add(giveUp)
	for at := 0; ; at++ {
		ctx, cancel := context.WithTimeout(context.Background(), callTime)
		answer, err := method(ctx, nodes[at%len(nodes)])
		cancel()
		if err == nil || !passes(err) || time.Now().After(end) {
			return answer, err
		}
		time.Sleep(200 * time.Millisecond)
	}
}

func schedule(nodes cluster, topic string, count int) error {
	for n := range count {
		request := &pb.ScheduleTimerRequest{
			Topic:     topic,
			Payload:   fmt.Appendf(nil, "timer %d", n),
			Headers:   map[string]string{"language": "go"},
			When:      &pb.ScheduleTimerRequest_Delay{Delay: durationpb.New(time.Second)},
			RequestId: rand.Text(), // a repetition schedules nothing more
		}
		_, err := call(nodes, func(ctx context.Context, node node) (*pb.ScheduleTimerResponse, error) {
			return node.timers.ScheduleTimer(ctx, request)
		})
		if err != nil {
			return err
		}
		fmt.Println("scheduled", n+1)
	}
	return nil
}

func consume(nodes cluster, topic, group string, count int) error {
	seen := map[string]bool{} // messages may come again: each counts once
	for len(seen) < count {
		received, err := call(nodes, func(ctx context.Context, node node) (*pb.ReceiveResponse, error) {
			return node.consuming.Receive(ctx, &pb.ReceiveRequest{
				Topic: topic, Group: group, MaxMessages: 16, WaitMs: 2_000, Rows: true,
			})
		})
		if err != nil {
			return err
		}
		if len(received.Messages) == 0 {
			continue
		}
		ack := &pb.AckRequest{Topic: topic, Group: group}
		for _, message := range received.Messages {
			ack.Leases = append(ack.Leases, message.Lease)
		}
		acked, err := call(nodes, func(ctx context.Context, node node) (*pb.AckResponse, error) {
			return node.consuming.Ack(ctx, ack)
		})
		if err != nil {
			return err
		}
		for at, result := range acked.Results {
			if result == pb.AckResult_ACK_RESULT_ACKED || result == pb.AckResult_ACK_RESULT_ALREADY_ACKED {
				seen[string(received.Messages[at].Payload)] = true
			}
		}
		fmt.Println("acked", len(seen))
	}
	return nil
}

func run(args []string) error {
	if len(args) != 4 {
		return fmt.Errorf("usage: go run . HOST:PORT,… TOPIC GROUP COUNT")
	}
	count, err := strconv.Atoi(args[3])
	if err != nil {
		return err
	}
	nodes, err := connect(strings.Split(args[0], ","))
	if err != nil {
		return err
	}
	ended := make(chan error, 2)
	go func() { ended <- schedule(nodes, args[1], count) }()
	go func() { ended <- consume(nodes, args[1], args[2], count) }()
	for range 2 {
		if err := <-ended; err != nil {
			return err
		}
	}
	return nil
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
