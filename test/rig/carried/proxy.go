package main

import (
	"io"
	"math/rand/v2"
	"net"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/remote"
)

// cutting is a proxy that cuts the streams' connections again and again, in the middle of
// what they carry. Connections for control and contents stay: an operation whose connection
// breaks fails, and is rolled back, which is another test.
func cutting(to string) (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			go pass(in, to)
		}
	}()
	return l.Addr().String(), nil
}

const (
	leastCut = 30 * time.Millisecond
	mostCut  = 700 * time.Millisecond
)

func pass(in net.Conn, to string) {
	defer in.Close()
	p, err := remote.ReadPreamble(in)
	if err != nil {
		return
	}
	out, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	defer out.Close()
	if _, err := out.Write(p.Append(nil)); err != nil {
		return
	}
	if _, chunks := p.Role.ChunkStream(); chunks || p.Role == remote.Commands || p.Role == remote.Bulk {
		cut := time.AfterFunc(leastCut+rand.N(mostCut-leastCut), func() { in.Close(); out.Close() })
		defer cut.Stop()
	}
	done := make(chan struct{}, 2)
	for _, c := range [][2]net.Conn{{in, out}, {out, in}} {
		go func() {
			_, _ = io.Copy(c[0], c[1])
			done <- struct{}{}
		}()
	}
	<-done
}
