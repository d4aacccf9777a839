package hostile

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/cluster/pki"
)

// port are strangers at the port for hosts and users.
func port() []client {
	raw := func(f func(context.Context, net.Conn)) func(context.Context, Target) int {
		return func(ctx context.Context, t Target) int {
			return once(ctx, "tcp", t.Address, func(c net.Conn) { f(ctx, c) })
		}
	}
	self := sync.OnceValue(selfMade)
	shake := func(proto string, certificate bool, f func(context.Context, net.Conn)) func(context.Context, Target) int {
		return raw(func(ctx context.Context, c net.Conn) {
			config := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{proto}}
			if certificate {
				config.Certificates = []tls.Certificate{self()}
			}
			conn := tls.Client(c, config)
			if conn.HandshakeContext(ctx) == nil {
				f(ctx, conn)
			}
		})
	}
	hello := []byte("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
	list := clusterv1connect.ClusterServiceListProcedure
	return append([]client{
		{"noise", 2, raw(func(_ context.Context, c net.Conn) { _, _ = c.Write(noise(512)); hold(c) })},
		{"silent", 100, raw(func(_ context.Context, c net.Conn) { hold(c) })},
		{"handshakes that stall", 100, raw(func(_ context.Context, c net.Conn) { _, _ = c.Write(hello); hold(c) })},
		{"slow handshakes", 50, raw(func(ctx context.Context, c net.Conn) { trickle(ctx, c, append(hello, noise(500)...)) })},
		{"idle without a certificate", 50, shake(pki.ProtoHTTP1, false, func(_ context.Context, c net.Conn) { hold(c) })},
		{"handshakes", 2, shake(pki.ProtoHTTP2, false, func(context.Context, net.Conn) {})},
		{"self-made certificates", 2, shake(pki.ProtoHTTP1, true, func(_ context.Context, c net.Conn) {
			_, _ = io.WriteString(c, post(list, "application/json", "2")+"{}")
			_, _ = c.Read(make([]byte, 1<<10))
		})},
		{"raft with self-made certificates", 2, shake(pki.ProtoRaft, true, func(_ context.Context, c net.Conn) { _, _ = c.Write(noise(512)); hold(c) })},
		{"raft without a certificate", 2, shake(pki.ProtoRaft, false, func(_ context.Context, c net.Conn) { _, _ = c.Write(noise(512)); hold(c) })},
		{"huge headers", 2, shake(pki.ProtoHTTP1, false, func(_ context.Context, c net.Conn) {
			_, _ = io.WriteString(c, "GET / HTTP/1.1\r\n")
			pour(c, []byte("X-Name: "+strings.Repeat("x", 4000)+"\r\n"))
		})},
		{"huge bodies", 2, shake(pki.ProtoHTTP1, false, func(_ context.Context, c net.Conn) {
			_, _ = io.WriteString(c, post(clusterv1connect.PeerServiceEnrollProcedure, "application/proto", fmt.Sprint(int64(1)<<40)))
			pour(c, make([]byte, 64<<10))
		})},
		{"wrong tokens", 2, wrongTokens},
	}, frames("tcp", func(f func(context.Context, net.Conn)) func(context.Context, Target) int {
		return shake(pki.ProtoHTTP2, false, f)
	})...)
}

// wrongTokens asks to be let in with tokens that nobody made.
func wrongTokens(ctx context.Context, t Target) (n int) {
	ctx, cancel := context.WithTimeout(ctx, held)
	defer cancel()
	h := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, a string) (net.Conn, error) {
			return dialer(network).DialContext(ctx, network, a)
		},
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
	}}
	defer h.CloseIdleConnections()
	key, err := pki.NewKey()
	if err != nil {
		return 0
	}
	csr, err := pki.NewRequest(key)
	if err != nil {
		return 0
	}
	peer := clusterv1connect.NewPeerServiceClient(h, "https://"+t.Address)
	for range 20 {
		_, err := peer.Enroll(ctx, connect.NewRequest(&clusterv1.EnrollRequest{TokenId: fmt.Sprintf("%x", noise(6)), Secret: noise(32), Csr: csr, Host: "node1"}))
		if err == nil || ctx.Err() != nil {
			break
		}
		if connect.CodeOf(err) == connect.CodeUnavailable {
			continue
		}
		n++
	}
	return n
}

// selfMade is a certificate that its holder signed.
func selfMade() tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "node1"}, DNSNames: []string{"node1"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		return tls.Certificate{}
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}
