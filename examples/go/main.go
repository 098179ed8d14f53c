// Schedules COUNT timers, receives and acks them, and continues through failovers of the cluster.
//
//	go run . HOST:PORT,HOST:PORT,… TOPIC GROUP COUNT
//
// Prints "scheduled N" when N timers are scheduled, and "acked N" after N messages are acked.
package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"strconv"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"timers/nodes"
	pb "timers/timerv1"
)

func schedule(timers pb.TimerServiceClient, topic string, count int) error {
	for n := range count {
		request := &pb.ScheduleTimerRequest{
			Topic:     topic,
			Payload:   fmt.Appendf(nil, "timer %d", n),
			Headers:   map[string]string{"language": "go"},
			When:      &pb.ScheduleTimerRequest_Delay{Delay: durationpb.New(time.Second)},
			RequestId: rand.Text(), // a repetition schedules nothing more
		}
		answer, err := nodes.Call(func(ctx context.Context) (*pb.ScheduleTimerResponse, error) {
			return timers.ScheduleTimer(ctx, request)
		})
		if err != nil {
			return err
		}
		if len(answer.TimerId) == 0 { // a conflict of keys is no error
			return fmt.Errorf("not scheduled: %v", answer.Result)
		}
		fmt.Println("scheduled", n+1)
	}
	return nil
}

func consume(consuming pb.ConsumeServiceClient, topic, group string, count int) error {
	seen := map[string]bool{} // messages may come again: each counts once
	for len(seen) < count {
		received, err := nodes.Call(func(ctx context.Context) (*pb.ReceiveResponse, error) {
			return consuming.Receive(ctx, &pb.ReceiveRequest{
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
		acked, err := nodes.Call(func(ctx context.Context) (*pb.AckResponse, error) {
			return consuming.Ack(ctx, ack)
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
	connection, err := nodes.Connect(args[0])
	if err != nil {
		return err
	}
	defer connection.Close()
	ended := make(chan error, 2)
	go func() { ended <- schedule(pb.NewTimerServiceClient(connection), args[1], count) }()
	go func() { ended <- consume(pb.NewConsumeServiceClient(connection), args[1], args[2], count) }()
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
