package hostile

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
)

// local knock at hostd's socket, as a user who may do more than read.
func local() []client {
	with := func(f func(context.Context, net.Conn)) func(context.Context, Target) int {
		return func(ctx context.Context, t Target) int {
			return once(ctx, "unix", t.hostd(), func(c net.Conn) { f(ctx, c) })
		}
	}
	list := clusterv1connect.ClusterServiceListProcedure
	zeros := sync.OnceValue(bomb)
	return append([]client{
		{"noise", 2, with(func(_ context.Context, c net.Conn) { _, _ = c.Write(noise(512)); hold(c) })},
		{"slow headers", 24, with(func(ctx context.Context, c net.Conn) {
			trickle(ctx, c, []byte(post(list, "application/json", "1")))
		})},
		{"huge headers", 2, with(func(_ context.Context, c net.Conn) {
			_, _ = io.WriteString(c, "GET / HTTP/1.1\r\n")
			pour(c, []byte("X-Name: "+strings.Repeat("x", 4000)+"\r\n"))
		})},
		{"huge bodies", 2, with(func(_ context.Context, c net.Conn) {
			_, _ = io.WriteString(c, post(list, "application/json", fmt.Sprint(int64(1)<<40)))
			pour(c, make([]byte, 64<<10))
		})},
		{"slow bodies", 8, with(func(ctx context.Context, c net.Conn) {
			_, _ = io.WriteString(c, post(list, "application/json", "1000"))
			trickle(ctx, c, make([]byte, 1000))
		})},
		{"endless bodies", 2, with(func(_ context.Context, c net.Conn) {
			_, _ = io.WriteString(c, "POST "+list+" HTTP/1.1\r\nHost: hostd\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
			pour(c, []byte("1000\r\n"+strings.Repeat(" ", 0x1000)+"\r\n"))
		})},
		{"compressed bodies", 1, with(func(_ context.Context, c net.Conn) {
			body := zeros()
			_, _ = io.WriteString(c, strings.Replace(post(list, "application/proto", fmt.Sprint(len(body))), "Host:", "Content-Encoding: gzip\r\nHost:", 1))
			_, _ = c.Write(body)
			_, _ = c.Read(make([]byte, 1<<10))
		})},
		{"requests without reading", 2, with(func(_ context.Context, c net.Conn) {
			pour(c, []byte(post(list, "application/json", "2")+"{}"))
		})},
	}, append(watchers(with), append(calls(), frames("unix", with)...)...)...)
}

func post(procedure, kind, length string) string {
	return "POST " + procedure + " HTTP/1.1\r\nHost: hostd\r\nContent-Type: " + kind + "\r\nConnect-Protocol-Version: 1\r\nContent-Length: " + length + "\r\n\r\n"
}

// bomb is a gigabyte of zeros.
func bomb() []byte {
	var b bytes.Buffer
	w, _ := gzip.NewWriterLevel(&b, gzip.BestSpeed) // the level is a known one
	zeros := make([]byte, 1<<20)
	for range 1 << 10 {
		_, _ = w.Write(zeros)
	}
	_ = w.Close()
	return b.Bytes()
}

// watchers never read what they asked for.
func watchers(with func(func(context.Context, net.Conn)) func(context.Context, Target) int) (all []client) {
	for name, procedure := range map[string]string{
		"unread sessions": gpuctlv1connect.HostServiceWatchSessionsProcedure, "unread events": clusterv1connect.ClusterServiceEventsProcedure,
		"unread watches": clusterv1connect.ClusterServiceWatchProcedure, "unread top": clusterv1connect.ClusterServiceTopProcedure,
	} {
		body := "\x00\x00\x00\x00\x02{}"
		if procedure == clusterv1connect.ClusterServiceEventsProcedure {
			body = "\x00\x00\x00\x00\x0f{\"follow\":true}"
		}
		all = append(all, client{name, 4, with(func(ctx context.Context, c net.Conn) {
			if u, ok := c.(*net.UnixConn); ok {
				_ = u.SetReadBuffer(1)
			}
			_, _ = io.WriteString(c, post(procedure, "application/connect+json", fmt.Sprint(len(body)))+body)
			rest(ctx, held)
		})})
	}
	return all
}

// calls are well made; what they ask for is not.
func calls() []client {
	with := func(f func(context.Context, *http.Client) error) func(context.Context, Target) int {
		return func(ctx context.Context, t Target) int {
			ctx, cancel := context.WithTimeout(ctx, held)
			defer cancel()
			h := unixrpc.Client(t.hostd())
			defer h.CloseIdleConnections()
			n := 0
			for range 100 {
				if code := connect.CodeOf(f(ctx, h)); code == connect.CodeUnavailable || code == connect.CodeDeadlineExceeded || ctx.Err() != nil {
					break
				}
				n++
			}
			return n
		}
	}
	return []client{
		{"unknown sessions", 2, with(func(ctx context.Context, h *http.Client) error {
			_, err := gpuctlv1connect.NewHostServiceClient(h, "http://hostd").DescribeSession(ctx,
				connect.NewRequest(&gpuctlv1.DescribeSessionRequest{Session: fmt.Sprintf("%x", noise(1+rand.IntN(1000)))}))
			return err
		})},
		{"costly claims", 2, with(func(ctx context.Context, h *http.Client) error {
			_, err := gpuctlv1connect.NewHostServiceClient(h, "http://hostd").CreateClaim(ctx, connect.NewRequest(&gpuctlv1.CreateClaimRequest{Expr: costly()}))
			return err
		})},
		{"costly places", 1, with(func(ctx context.Context, h *http.Client) error {
			_, err := clusterv1connect.NewClusterServiceClient(h, "http://hostd").Place(ctx, connect.NewRequest(&clusterv1.PlaceRequest{Claim: &clusterv1.Claim{Expr: costly()}}))
			return err
		})},
		{"costly lists", 1, with(func(ctx context.Context, h *http.Client) error {
			_, err := clusterv1connect.NewClusterServiceClient(h, "http://hostd").List(ctx,
				connect.NewRequest(&clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_GPU, Where: costly()}))
			return err
		})},
	}
}

// costly is an expression that no GPU meets, and that costs much to find out.
func costly() string {
	deep := 10 + rand.IntN(5000)
	switch rand.IntN(5) {
	case 0:
		return strings.Repeat("(", deep) + "false" + strings.Repeat(")", deep)
	case 1:
		return strings.Repeat("!", deep|1) + "true && false"
	case 2:
		list := "[" + strings.Repeat("1,", 200) + "1]"
		return list + ".all(a, " + list + ".all(b, " + list + ".all(c, a + b + c > 0))) && false"
	case 3:
		return "('" + strings.Repeat("a", 4000) + "!').matches('(a|a?)+(a|a?)+(a|aa)+$')"
	}
	return "id == 'none'" + strings.Repeat(" || id == 'none'", deep)
}
