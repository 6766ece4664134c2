// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// follow runs a feed into a recorder until the test ends.
func follow(t testing.TB, at Source, r *recorder) {
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		Run(ctx, slog.New(slog.DiscardHandler), at, r)
		close(done)
	}()
	t.Cleanup(func() {
		stop()
		<-done
	})
}

func TestWhoComesLateGetsWhatWasBefore(t *testing.T) {
	for name, topic := range map[string][][]byte{"to 0.25": nil, "from 0.28": {nil}, "with a topic": {[]byte("topic")}} {
		t.Run(name, func(t *testing.T) {
			at, r := source(t), new(recorder)
			p := publish(t, at)
			p.topic = topic
			p.send(false, "a", "b")
			follow(t, at, r)
			r.untilHas(t, "a", "b")
			p.send(false, "c")
			r.untilHas(t, "a", "b", "c")
		})
	}
}

func TestNothingPublishedIsKnown(t *testing.T) {
	at, r := source(t), new(recorder)
	publish(t, at)
	follow(t, at, r)
	r.until(t, "untouched", func() bool { return r.untouched && r.connected })
}

func TestAGapIsFilledByTheReplay(t *testing.T) {
	at, r := source(t), new(recorder)
	p := publish(t, at)
	follow(t, at, r)
	r.until(t, "connected", func() bool { return r.connected })
	p.send(false, "a")
	p.send(true, "b", "c")
	p.send(false, "d")
	r.untilHas(t, "a", "b", "c", "d")
	r.until(t, "dropped nothing", func() bool { return len(r.drops) == 0 && r.missed > 0 })
}

func TestWhatWasLostIsAskedForWithoutAnotherBatch(t *testing.T) {
	at, r := source(t), new(recorder)
	p := publish(t, at)
	follow(t, at, r)
	r.until(t, "connected", func() bool { return r.connected })
	p.send(true, "a")
	r.untilHas(t, "a")
}

func TestAReplayWithAHoleIsAskedForAgain(t *testing.T) {
	at, r := source(t), new(recorder)
	p := publish(t, at)
	p.hole = 7
	var all []string
	for n := range 20 {
		all = append(all, fmt.Sprint(n))
	}
	p.send(true, all...)
	follow(t, at, r)
	r.untilHas(t, all...)
}

func TestWhatCanNoLongerBeReplayedVoidsWhatWasTaken(t *testing.T) {
	at, r := source(t), new(recorder)
	p := publish(t, at)
	p.keep = 2
	p.send(false, "a")
	follow(t, at, r)
	r.untilHas(t, "a")
	p.send(true, "b", "c", "d")
	r.untilHas(t, "c", "d")
	r.until(t, "one dropped", func() bool { return len(r.drops) == 1 })
}

func TestWithoutAReplayAGapVoidsWhatWasTaken(t *testing.T) {
	at, r := source(t), new(recorder)
	at.Replay = ""
	p := publish(t, at)
	follow(t, at, r)
	r.until(t, "connected", func() bool { return r.connected })
	for n := 0; ; n++ { // until the subscription is there
		p.send(false, fmt.Sprint(n))
		time.Sleep(time.Millisecond)
		if r.Position().Next > 0 {
			break
		}
	}
	p.send(true, "lost")
	p.send(false, "x")
	r.untilHas(t, "x")
}

// TestAPublisherThatStartsAnewVoidsWhatWasTaken: also if it is soon further than the one
// before ever was, so that no number goes back.
func TestAPublisherThatStartsAnewVoidsWhatWasTaken(t *testing.T) {
	for _, batches := range [][]string{nil, {"x"}, {"x", "y", "z", "u", "v"}} {
		t.Run(fmt.Sprint(len(batches)), func(t *testing.T) {
			at, r := source(t), new(recorder)
			p := publish(t, at)
			p.send(false, "a", "b", "c")
			follow(t, at, r)
			r.untilHas(t, "a", "b", "c")
			p.stop()
			r.until(t, "disconnected", func() bool { return !r.connected })
			publish(t, at).send(false, batches...)
			r.untilHas(t, batches...)
			r.until(t, "connected", func() bool { return r.connected })
		})
	}
}

func TestALostConnectionToTheSamePublisherVoidsNothing(t *testing.T) {
	at, r := source(t), new(recorder)
	p := publish(t, at)
	p.send(false, "a", "b")
	r.Take(0, []byte("a")) // as from a snapshot
	follow(t, at, r)
	r.untilHas(t, "a", "b")
	r.until(t, "dropped nothing", func() bool { return len(r.drops) == 0 && r.connected })
}

func TestASnapshotOfAnotherPublisherIsVoid(t *testing.T) {
	at, r := source(t), new(recorder)
	p := publish(t, at)
	p.send(false, "a", "b")
	r.Take(0, []byte("something else"))
	follow(t, at, r)
	r.untilHas(t, "a", "b")
}

// TestWhateverIsLostAllIsTakenInOrder: publishers come and go, and lose what they like.
func TestWhateverIsLostAllIsTakenInOrder(t *testing.T) {
	at, r := source(t), new(recorder)
	random := rand.New(rand.NewPCG(1, 1))
	follow(t, at, r)
	for life := range 4 {
		p := publish(t, at)
		var sent []string
		for n := range 300 {
			batch := fmt.Sprint(life, " ", n)
			p.send(random.IntN(4) == 0, batch)
			sent = append(sent, batch)
			if random.IntN(20) == 0 {
				time.Sleep(time.Millisecond)
			}
		}
		r.until(t, "all of it", func() bool { return slices.Equal(r.batches, sent) })
		p.stop()
	}
}

func TestWhatIsNoEndpointIsRefused(t *testing.T) {
	for _, bad := range []Endpoint{"", "tcp://", "tcp://host", "tcp://*:5557", "ipc://", "http://a:1", "a:1"} {
		if bad.Check() == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	for _, good := range []Endpoint{"tcp://host:1", "tcp://[::1]:1", "ipc:///run/events"} {
		if err := good.Check(); err != nil {
			t.Error(err)
		}
	}
}
