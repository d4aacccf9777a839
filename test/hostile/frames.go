package hostile

import (
	"bytes"
	"context"
	"io"
	"net"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
)

// frames are floods of HTTP/2.
func frames(network string, with func(func(context.Context, net.Conn)) func(context.Context, Target) int) []client {
	flood := func(f func(*http2.Framer) error) func(context.Context, Target) int {
		return with(func(_ context.Context, c net.Conn) {
			if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
				return
			}
			fr := http2.NewFramer(c, nil)
			err := fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
			for err == nil { // answers are not read
				err = f(fr)
			}
		})
	}
	block := func(fields ...string) []byte {
		var b bytes.Buffer
		e := hpack.NewEncoder(&b)
		for i := 0; i+1 < len(fields); i += 2 {
			_ = e.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]})
		}
		return b.Bytes()
	}
	scheme := map[string]string{"unix": "http", "tcp": "https"}[network]
	request := block(":method", "POST", ":scheme", scheme, ":authority", "h", ":path", clusterv1connect.ClusterServiceListProcedure, "content-type", "application/proto")
	return []client{
		{"frames: settings and pings", 2, flood(func(f *http2.Framer) error {
			if err := f.WriteSettings(); err != nil {
				return err
			}
			return f.WritePing(false, [8]byte{})
		})},
		{"frames: headers that go on", 1, with(func(_ context.Context, c net.Conn) {
			_, _ = io.WriteString(c, http2.ClientPreface)
			f := http2.NewFramer(c, nil)
			err := f.WriteSettings()
			if err == nil {
				err = f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: request})
			}
			for err == nil {
				err = f.WriteContinuation(1, false, block("x", string(bytes.Repeat([]byte("x"), 8<<10))))
			}
		})},
		{"frames: requests taken back", 2, streams(with, request, func(f *http2.Framer, id uint32) error { return f.WriteRSTStream(id, http2.ErrCodeCancel) })},
		{"frames: requests without end", 2, streams(with, request, func(f *http2.Framer, id uint32) error { return f.WriteData(id, false, make([]byte, 100)) })},
		{"frames: noise", 1, flood(func(f *http2.Framer) error {
			n := noise(64)
			return f.WriteRawFrame(http2.FrameType(n[0]%12), http2.Flags(n[1]), 1+uint32(n[2])*2, n)
		})},
		{"frames: too long", 1, with(func(_ context.Context, c net.Conn) {
			_, _ = io.WriteString(c, http2.ClientPreface+"\xff\xff\xff\x00\x00\x00\x00\x00\x01")
			pour(c, make([]byte, 64<<10))
		})},
	}
}

// streams opens one request behind the other.
func streams(with func(func(context.Context, net.Conn)) func(context.Context, Target) int, request []byte, then func(*http2.Framer, uint32) error) func(context.Context, Target) int {
	return with(func(_ context.Context, c net.Conn) {
		if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
			return
		}
		f := http2.NewFramer(c, nil)
		err := f.WriteSettings()
		for id := uint32(1); err == nil && id < 1<<30; id += 2 {
			if err = f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: request, EndHeaders: true}); err == nil {
				err = then(f, id)
			}
		}
	})
}
