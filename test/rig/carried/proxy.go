package main

import (
	"io"
	"math"
	"math/rand/v2"
	"net"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/remote"
)

// cutting is a proxy that cuts connections in the middle of what they carry: with the mode cut
// those of streams, again and again; with the mode break some of those of contents, whose
// operations fail then and are rolled back. Connections for control stay.
func cutting(to, mode string) (string, error) {
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
			go pass(in, to, mode)
		}
	}()
	return l.Addr().String(), nil
}

const (
	leastCut = 30 * time.Millisecond
	mostCut  = 700 * time.Millisecond
	// Of the connections of contents, one in breakOne breaks after 1 byte to 8 MiB of either direction.
	breakOne   = 6
	breakAfter = 23 // bits
)

func pass(in net.Conn, to, mode string) {
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
	limit := int64(math.MaxInt64)
	_, stream := p.Role.ChunkStream()
	switch p.Role {
	case remote.Import, remote.Export, remote.Part:
		if mode == "break" && rand.N(breakOne) == 0 {
			limit = 1 + rand.N(int64(1)<<rand.N(breakAfter+1))
		}
	case remote.Commands, remote.Bulk:
		stream = true
	}
	if stream && mode == "cut" {
		cut := time.AfterFunc(leastCut+rand.N(mostCut-leastCut), func() { in.Close(); out.Close() })
		defer cut.Stop()
	}
	done := make(chan struct{}, 2)
	for _, c := range [][2]net.Conn{{in, out}, {out, in}} {
		go func() {
			_, _ = io.CopyN(c[0], c[1], limit)
			done <- struct{}{}
		}()
	}
	<-done
}
