// SPDX-License-Identifier: Apache-2.0

// Both ends of the measurement of a proxy, faster than any proxy between them.
//
//	proxy_load serve
//	    answers completions as a stream of four tokens, whatever was asked; prints
//	    its URL and ends when stdin is closed
//	proxy_load load -url URL -form ids|text|chat -tokens N -rate R -seconds S
//	    open loop: a request each 1/R s; prints each one's time from its intended
//	    start to the first byte of its answer's body, in us, one per line
//	proxy_load load -url URL ... -workers W -seconds S
//	    closed loop: W at once; prints how many were answered in full, and the seconds
//
// A request that fails ends it with status 1 and says why.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"log"
	"math/rand"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const event = `data: {"id":"cmpl-0","object":"text_completion","created":0,` +
	`"model":"null","choices":[{"index":0,"text":" a","finish_reason":null}]}` + "\n\n"

func main() {
	log.SetFlags(0)
	if len(os.Args) < 2 {
		log.Fatal("serve or load expected")
	}
	switch os.Args[1] {
	case "serve":
		serve()
	case "load":
		load(os.Args[2:])
	default:
		log.Fatalf("%q: serve or load expected", os.Args[1])
	}
}

func serve() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	answer := func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			io.WriteString(w, `{"object":"list","data":[{"id":"null","object":"model"}]}`)
			return
		}
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, event)
		w.(http.Flusher).Flush()
		io.WriteString(w, event+event+event+"data: [DONE]\n\n")
	}
	fmt.Println("http://" + listener.Addr().String())
	go http.Serve(listener, http.HandlerFunc(answer))
	io.Copy(io.Discard, os.Stdin)
}

func load(arguments []string) {
	flags := flag.NewFlagSet("load", flag.ExitOnError)
	url := flags.String("url", "", "of the proxy or the server")
	form := flags.String("form", "ids", "ids, text or chat")
	tokens := flags.Int("tokens", 16, "of a prompt; text is four bytes a token")
	rate := flags.Float64("rate", 100, "requests a second, open loop")
	workers := flags.Int("workers", 0, "at once, closed loop")
	seconds := flags.Float64("seconds", 5, "how long")
	seed := flags.Int64("seed", 1, "of the prompts")
	flags.Parse(arguments)

	client := &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 1024, DisableCompression: true,
	}}
	target := *url + "/v1/completions"
	if *form == "chat" {
		target = *url + "/v1/chat/completions"
	}
	bodies := make([][]byte, 32)
	random := rand.New(rand.NewSource(*seed))
	for i := range bodies {
		bodies[i] = body(*form, *tokens, random)
	}
	duration := time.Duration(*seconds * float64(time.Second))
	if *workers > 0 {
		closedLoop(client, target, bodies, *workers, duration)
	} else {
		openLoop(client, target, bodies, *rate, duration)
	}
}

func openLoop(
	client *http.Client, target string, bodies [][]byte, rate float64, duration time.Duration,
) {
	count := int(rate * duration.Seconds())
	times := make([]time.Duration, count)
	var running sync.WaitGroup
	start := time.Now().Add(10 * time.Millisecond)
	for i := 0; i < count; i++ {
		intended := start.Add(time.Duration(float64(i) / rate * float64(time.Second)))
		time.Sleep(time.Until(intended))
		running.Add(1)
		go func() {
			defer running.Done()
			times[i] = post(client, target, bodies[i%len(bodies)]).Sub(intended)
		}()
	}
	running.Wait()
	for _, took := range times {
		fmt.Println(took.Microseconds())
	}
}

func closedLoop(
	client *http.Client, target string, bodies [][]byte, workers int, duration time.Duration,
) {
	var done atomic.Int64
	var running sync.WaitGroup
	start := time.Now()
	for w := 0; w < workers; w++ {
		running.Add(1)
		go func() {
			defer running.Done()
			for i := w; time.Since(start) < duration; i++ {
				post(client, target, bodies[i%len(bodies)])
				done.Add(1)
			}
		}()
	}
	running.Wait()
	fmt.Println(done.Load(), time.Since(start).Seconds())
}

// post returns when the first byte of the answer came, having read all of it.
func post(client *http.Client, target string, body []byte) time.Time {
	response, err := client.Post(target, "application/json", bytes.NewReader(body))
	if err != nil {
		log.Fatal(err)
	}
	defer response.Body.Close()
	first := make([]byte, 1)
	if _, err := io.ReadFull(response.Body, first); err != nil {
		log.Fatal(err)
	}
	came := time.Now()
	rest, err := io.ReadAll(response.Body)
	if err != nil {
		log.Fatal(err)
	}
	if response.StatusCode != 200 || !bytes.HasSuffix(rest, []byte("[DONE]\n\n")) {
		log.Fatalf("HTTP %d: %.300s%.300s", response.StatusCode, first, rest)
	}
	return came
}

func body(form string, tokens int, random *rand.Rand) []byte {
	const rest = `,"model":"null","max_tokens":4,"temperature":0,"stream":true}`
	var prompt strings.Builder
	switch form {
	case "ids":
		prompt.WriteString(`{"prompt":[`)
		for i := 0; i < tokens; i++ {
			if i > 0 {
				prompt.WriteString(", ")
			}
			prompt.WriteString(strconv.Itoa(random.Intn(150000)))
		}
		prompt.WriteString("]")
	case "text":
		prompt.WriteString(`{"prompt":"` + words(tokens, random) + `"`)
	case "chat":
		prompt.WriteString(`{"messages":[{"role":"user","content":"` +
			words(tokens, random) + `"}]`)
	default:
		log.Fatalf("-form %q: ids, text or chat expected", form)
	}
	return []byte(prompt.String() + rest)
}

func words(tokens int, random *rand.Rand) string {
	list := []string{"def", "a = b", "self.", "return", "import", "\\n    ", "for x in y"}
	var text strings.Builder
	for text.Len() < 4*tokens {
		text.WriteString(list[random.Intn(len(list))] + " ")
	}
	return text.String()
}
