// Cancels orders that are not paid in time, and continues through failovers of the cluster.
//
//	go run ./orders HOST:PORT,HOST:PORT,… TOPIC GROUP COUNT
//
// Places COUNT orders, each with a timer, and pays every second one. Prints "scheduled N" when N
// orders are placed, and "acked COUNT" when each timer is cancelled, or its message acked.
package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"timers/nodes"
	pb "timers/timerv1"
)

const payWithin = 2 * time.Second

// order is a row of the application's database. Its state decides; its timer is only a reminder.
type order struct {
	state string // open, paid or cancelled
	timer []byte // id
	over  bool   // the timer is cancelled, or its message acked
}

type shop struct {
	timers pb.TimerServiceClient
	topic  string

	lock   sync.Mutex
	orders map[string]*order
	over   sync.WaitGroup // orders whose timer is not over
}

func (s *shop) place(name string) error {
	s.lock.Lock()
	s.orders[name] = &order{state: "open"}
	s.over.Add(1)
	s.lock.Unlock()
	request := &pb.ScheduleTimerRequest{
		Topic: s.topic, Key: name, Payload: []byte(name),
		When:            &pb.ScheduleTimerRequest_Delay{Delay: durationpb.New(payWithin)},
		RequestId:       rand.Text(), // a repetition schedules nothing more
		ConflictIsError: true,        // ALREADY_EXISTS: a pending timer has the key
	}
	answer, err := nodes.Call(func(ctx context.Context) (*pb.ScheduleTimerResponse, error) {
		return s.timers.ScheduleTimer(ctx, request)
	})
	if err != nil {
		return err
	}
	s.lock.Lock()
	defer s.lock.Unlock()
	s.orders[name].timer = answer.TimerId
	return nil
}

func (s *shop) pay(name string) error {
	s.lock.Lock()
	paid := s.orders[name]
	isOpen := paid.state == "open"
	if isOpen {
		paid.state = "paid" // before the cancel: from now on the timer has no effect
	}
	s.lock.Unlock()
	if !isOpen {
		return nil // too late
	}
	answer, err := nodes.Call(func(ctx context.Context) (*pb.CancelResponse, error) {
		return s.timers.Cancel(ctx, &pb.CancelRequest{TimerIds: paid.timer})
	})
	if err != nil {
		return err
	}
	switch answer.Results[0] {
	case pb.CancelResult_CANCEL_RESULT_CANCELLED, pb.CancelResult_CANCEL_RESULT_ALREADY_CANCELLED:
		s.end(name)
	}
	return nil // otherwise it has fired: its message comes
}

// due works on a message of a timer. The same message may come again. A message without an order, such
// as one of an earlier run, is acked.
func (s *shop) due(_ context.Context, message *pb.DeliveredMessage) error {
	s.lock.Lock()
	defer s.lock.Unlock()
	if late := s.orders[string(message.Payload)]; late != nil && late.state == "open" {
		late.state = "cancelled"
	}
	return nil
}

func (s *shop) end(name string) {
	s.lock.Lock()
	defer s.lock.Unlock()
	if ended := s.orders[name]; ended != nil && !ended.over {
		ended.over = true
		s.over.Done()
	}
}

func run(args []string) error {
	if len(args) != 4 {
		return fmt.Errorf("usage: go run ./orders HOST:PORT,… TOPIC GROUP COUNT")
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
	s := &shop{timers: pb.NewTimerServiceClient(connection), topic: args[1], orders: map[string]*order{}}
	reader := &consumer{service: pb.NewConsumeServiceClient(connection), topic: args[1], group: args[2],
		work: s.due, acked: func(message *pb.DeliveredMessage) { s.end(string(message.Payload)) }}
	stay, leave := context.WithCancel(context.Background())
	defer leave()
	left := make(chan struct{})
	go func() {
		defer close(left)
		reader.run(stay)
	}()
	session := rand.Text() // so that no two runs have orders of one name
	for n := range count {
		name := fmt.Sprintf("order-%s-%d", session, n)
		if err := s.place(name); err != nil {
			return err
		}
		if n%2 == 1 {
			if err := s.pay(name); err != nil {
				return err
			}
		}
		fmt.Println("scheduled", n+1)
	}
	s.over.Wait()
	leave()
	<-left
	s.lock.Lock() // work of a stream that broke may go on
	defer s.lock.Unlock()
	states := map[string]int{}
	for _, each := range s.orders {
		states[each.state]++
	}
	fmt.Println("acked", states["paid"]+states["cancelled"])
	return nil
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
