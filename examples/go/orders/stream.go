package main

import (
	"context"
	"errors"
	"io"
	"log"
	"time"

	pb "timers/timerv1"
)

const (
	credit  = 16 // messages under way to this process, at most
	leaseMs = 30_000
	backoff = 200 * time.Millisecond

	leaveWithin = 10 * time.Second // then the messages at work are left to others
)

type outcome struct {
	message *pb.DeliveredMessage
	err     error
}

// consumer works on the messages of a group. The cluster delivers a message again after a failure, and
// if the answer to its ack is lost.
type consumer struct {
	service      pb.ConsumeServiceClient
	topic, group string
	work         func(context.Context, *pb.DeliveredMessage) error
	acked        func(*pb.DeliveredMessage) // it is never delivered again
}

// run opens a stream after the other. When stay ends, it finishes the messages at work, and returns.
func (c *consumer) run(stay context.Context) {
	for stay.Err() == nil {
		if err := c.stream(stay); err != nil {
			log.Println("the stream ended:", err)
			time.Sleep(backoff)
		}
	}
}

// stream serves one stream. This goroutine alone sends: gRPC allows no two. Returns nil after it has left.
func (c *consumer) stream(stay context.Context) error {
	ctx, cancel := context.WithCancel(context.Background()) // also ends the work, because its leases end
	defer cancel()
	stop := context.AfterFunc(stay, func() { time.AfterFunc(leaveWithin, cancel) })
	defer stop()
	stream, err := c.service.Consume(ctx)
	if err != nil {
		return err
	}
	err = stream.Send(&pb.ConsumeRequest{Kind: &pb.ConsumeRequest_Open{Open: &pb.OpenConsumer{
		Topic: c.topic, Group: c.group, LeaseMs: leaseMs, Credit: credit, Rows: true}}})
	responses, outcomes, broken := make(chan *pb.ConsumeResponse), make(chan outcome), make(chan error, 1)
	go func() {
		for {
			response, err := stream.Recv()
			if err != nil {
				broken <- err
				return
			}
			select {
			case responses <- response:
			case <-ctx.Done():
				return
			}
		}
	}()
	held := map[uint64]*pb.DeliveredMessage{}   // queue offset -> message at work
	asking := map[uint64]*pb.DeliveredMessage{} // request_no -> message whose ack has no answer yet
	renew := time.NewTicker(leaseMs * time.Millisecond / 2)
	defer renew.Stop()
	leave := stay.Done()
	confirmed, closed := false, false // no more deliveries follow; nothing more is sent
	for err == nil {
		select {
		case err = <-broken: // the reason; after an error of Send, too
			if closed && errors.Is(err, io.EOF) {
				return nil // the node has answered all acks
			}
		case <-leave:
			leave = nil
			err = stream.Send(&pb.ConsumeRequest{Kind: &pb.ConsumeRequest_Leaving{Leaving: true}})
		case <-renew.C:
			if len(held) > 0 {
				err = stream.Send(extension(held))
			}
		case done := <-outcomes:
			number := done.message.QueueOffset + 1
			delete(held, done.message.QueueOffset)
			if done.err == nil {
				asking[number] = done.message
			}
			err = stream.Send(settlement(done, number))
			if err == nil && leave != nil { // a delivery uses credit up
				err = stream.Send(&pb.ConsumeRequest{Kind: &pb.ConsumeRequest_Credit{Credit: 1}})
			}
		case response := <-responses:
			for _, message := range response.GetDeliveries().GetMessages() {
				held[message.QueueOffset] = message
				go func() {
					select {
					case outcomes <- outcome{message, c.work(ctx, message)}:
					case <-ctx.Done():
					}
				}()
			}
			if answer := response.GetAcked(); answer != nil && asking[answer.RequestNo] != nil {
				c.answered(asking[answer.RequestNo], answer)
				delete(asking, answer.RequestNo)
			}
			confirmed = confirmed || response.GetLeaving()
		}
		if err == nil && confirmed && len(held) == 0 && !closed {
			closed = true
			err = stream.CloseSend()
		}
	}
	return err
}

func (c *consumer) answered(message *pb.DeliveredMessage, answer *pb.AckResponse) {
	for _, result := range answer.Results { // one: of the one lease in the request
		switch result {
		case pb.AckResult_ACK_RESULT_ACKED, pb.AckResult_ACK_RESULT_ALREADY_ACKED:
			c.acked(message)
		default: // such as LEASE_LOST
			log.Printf("message %d may come again: %v", message.QueueOffset, result)
		}
	}
	if answer.Error != nil {
		log.Printf("message %d may come again: %v", message.QueueOffset, answer.Error)
	}
}

func extension(held map[uint64]*pb.DeliveredMessage) *pb.ConsumeRequest {
	extend := &pb.ExtendRequest{LeaseMs: leaseMs}
	for _, message := range held {
		extend.Leases = append(extend.Leases, message.Lease)
	}
	return &pb.ConsumeRequest{Kind: &pb.ConsumeRequest_Extend{Extend: extend}}
}

func settlement(done outcome, number uint64) *pb.ConsumeRequest {
	leases := [][]byte{done.message.Lease}
	if done.err != nil { // delivered again after the group's backoff
		nack := &pb.NackRequest{RequestNo: number, Leases: leases, Detail: done.err.Error()}
		return &pb.ConsumeRequest{Kind: &pb.ConsumeRequest_Nack{Nack: nack}}
	}
	ack := &pb.AckRequest{RequestNo: number, Leases: leases}
	return &pb.ConsumeRequest{Kind: &pb.ConsumeRequest_Ack{Ack: ack}}
}
