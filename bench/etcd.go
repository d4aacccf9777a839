package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protowire"
)

const (
	etcdPort     = 7671 // of clients, and those that follow
	etcdPeerPort = 7681
	maxAnswer    = 1 << 20
)

// etcd is a cluster of as many members, with TLS between them as hosts have it.
type etcd struct {
	members []*process
	clients []*connect.Client[wire, wire]
}

// wire is an encoded message: gRPC without etcd's own modules.
type wire []byte

// asIs is the codec of wire.
type asIs struct{}

func (asIs) Name() string { return "proto" }

func (asIs) Marshal(m any) ([]byte, error) {
	w, ok := m.(*wire)
	if !ok {
		return nil, fmt.Errorf("a %T is not on the wire", m)
	}
	return *w, nil
}

func (asIs) Unmarshal(data []byte, m any) error {
	w, ok := m.(*wire)
	if !ok {
		return fmt.Errorf("a %T is not on the wire", m)
	}
	*w = bytes.Clone(data)
	return nil
}

func etcdURL(i int) string { return fmt.Sprintf("http://127.0.0.1:%d", etcdPort+i) }

// startEtcd returns what it started even with an error, which wraps
// exec.ErrNotFound when there is no etcd.
func startEtcd(ctx context.Context, dir string) (*etcd, error) {
	e := &etcd{}
	bin, err := exec.LookPath("etcd")
	if err != nil {
		return e, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return e, err
	}
	peer := func(i int) string { return fmt.Sprintf("https://127.0.0.1:%d", etcdPeerPort+i) }
	var all []string
	for i := range members {
		all = append(all, fmt.Sprintf("e%d=%s", i, peer(i)))
	}
	for i := range members {
		name := fmt.Sprint("e", i)
		p, _, err := startProcess(filepath.Join(dir, name+".log"), bin,
			"--name", name, "--data-dir", filepath.Join(dir, name), "--initial-cluster", strings.Join(all, ","), "--initial-cluster-state", "new",
			"--listen-client-urls", etcdURL(i), "--advertise-client-urls", etcdURL(i),
			"--listen-peer-urls", peer(i), "--initial-advertise-peer-urls", peer(i), "--peer-auto-tls")
		if err != nil {
			return e, err
		}
		e.members = append(e.members, p)
		protocols := new(http.Protocols)
		protocols.SetUnencryptedHTTP2(true)
		e.clients = append(e.clients, connect.NewClient[wire, wire](&http.Client{Transport: &http.Transport{Protocols: protocols}},
			etcdURL(i)+"/etcdserverpb.KV/Put", connect.WithGRPC(), connect.WithCodec(asIs{})))
	}
	for _, p := range e.members {
		if err := p.await(ctx, 30*time.Second, func() bool { _, _, err := e.leader(ctx); return err == nil }); err != nil {
			return e, err
		}
	}
	return e, nil
}

func (e *etcd) close() {
	for _, p := range e.members {
		p.end(syscall.SIGTERM)
	}
}

// leader says which member leads, and one that does not.
func (e *etcd) leader(ctx context.Context) (leader, follower int, err error) {
	leader, follower = -1, -1
	for i := range e.members {
		var s struct {
			Header struct {
				Member string `json:"member_id"`
			} `json:"header"`
			Leader string `json:"leader"`
		}
		if err := etcdJSON(ctx, etcdURL(i)+"/v3/maintenance/status", &s); err != nil {
			return 0, 0, err
		}
		if s.Leader == s.Header.Member && s.Leader != "" {
			leader = i
		} else if s.Leader != "" {
			follower = i
		}
	}
	if leader < 0 || follower < 0 {
		return 0, 0, fmt.Errorf("etcd has no leader")
	}
	return leader, follower, nil
}

func etcdJSON(ctx context.Context, url string, to any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader("{}"))
	if err != nil {
		return err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	data, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer))
	if err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", url, res.Status, data)
	}
	return json.Unmarshal(data, to)
}

// put says how long it took until it was committed.
func (e *etcd) put(ctx context.Context, throughLeader bool, key string, value []byte) (time.Duration, error) {
	at, follower, err := e.leader(ctx)
	if err != nil {
		return 0, err
	}
	if !throughLeader {
		at = follower
	}
	m := wire(protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), []byte(key)))
	m = protowire.AppendBytes(protowire.AppendTag(m, 2, protowire.BytesType), value)
	begin := time.Now()
	if _, err := e.clients[at].CallUnary(ctx, connect.NewRequest(&m)); err != nil {
		return 0, fmt.Errorf("etcd put: %w", err)
	}
	return time.Since(begin), nil
}
