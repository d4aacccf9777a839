package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/gpuctl/gpuctl/internal/wait"
)

// RunError is a command on a host that failed.
type RunError struct {
	Host    string
	Command string
	Status  int // -1: ended by a signal
	Stderr  string
}

// Error implements error.
func (e *RunError) Error() string {
	return fmt.Sprintf("%s: %q: exit status %d: %s", e.Host, e.Command, e.Status, strings.TrimSpace(e.Stderr))
}

// connection returns the connection to the host, made if there is none.
func (h *Host) connection(ctx context.Context) (*ssh.Client, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.client != nil {
		return h.client, nil
	}
	s, err := h.current()
	if err != nil {
		return nil, err
	}
	img := image{s.Image}
	key, err := os.ReadFile(img.path("key"))
	if err != nil {
		return nil, err
	}
	signer, err := ssh.ParsePrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", img.path("key"), err)
	}
	pub, err := os.ReadFile(img.path("host.pub"))
	if err != nil {
		return nil, err
	}
	hostKey, _, _, _, err := ssh.ParseAuthorizedKey(pub)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", img.path("host.pub"), err)
	}
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(s.Port))
	d := net.Dialer{Timeout: 10 * time.Second}
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	// QEMU accepts at once, sshd may answer much later or never.
	limit := time.Now().Add(20 * time.Second)
	if d, ok := ctx.Deadline(); ok && d.Before(limit) {
		limit = d
	}
	if err := conn.SetDeadline(limit); err != nil {
		conn.Close()
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	c, channels, requests, err := ssh.NewClientConn(conn, address, &ssh.ClientConfig{
		User: "root", Auth: []ssh.AuthMethod{ssh.PublicKeys(signer)},
		HostKeyCallback:   ssh.FixedHostKey(hostKey),
		HostKeyAlgorithms: []string{hostKey.Type()},
	})
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		conn.Close()
		return nil, err
	}
	client := ssh.NewClient(c, channels, requests)
	h.client, h.lost = client, nil
	go func() { // ends with the connection
		err := client.Wait()
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.client == client {
			h.client, h.lost = nil, fmt.Errorf("its connection broke: %w", err)
		}
	}()
	return client, nil
}

// connected waits until sshd lets us in.
func (h *Host) connected(ctx context.Context) error {
	for {
		_, err := h.connection(ctx)
		if err == nil {
			return nil
		}
		if _, cerr := h.current(); cerr != nil {
			return cerr
		}
		if ctx.Err() != nil {
			return fmt.Errorf("sshd does not answer: %w", err)
		}
		_ = wait.For(ctx, 100*time.Millisecond)
	}
}

// disconnect drops the connection; the next use makes another.
func (h *Host) disconnect() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.client != nil {
		_ = h.client.Close()
		h.client = nil
	}
}

// why adds to an error why the connection broke, which is what EOF comes from.
func (h *Host) why(err error) error {
	if !errors.Is(err, io.EOF) {
		return err
	}
	time.Sleep(10 * time.Millisecond) // whoever waits for the connection may not have run yet
	h.mu.Lock()
	defer h.mu.Unlock()
	return errors.Join(err, h.lost)
}

// dropped forgets a connection that turned out dead.
func (h *Host) dropped(c *ssh.Client) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.client == c {
		_ = h.client.Close()
		h.client = nil
	}
}

// Run runs a line of shell as root and returns its standard output. A command
// that fails gives a *RunError. When ctx ends, the command gets SIGKILL if the
// host still can deliver it.
func (h *Host) Run(ctx context.Context, command string) (string, error) {
	var out bytes.Buffer
	err := h.Stream(ctx, command, nil, &out, nil)
	return out.String(), err
}

// Stream is Run with standard input and output of the caller's; nil ones are
// empty and dropped. What the command says on standard error is in the error too.
func (h *Host) Stream(ctx context.Context, command string, in io.Reader, out, errs io.Writer) error {
	s, client, err := h.session(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", h.Name, err)
	}
	defer func() { _ = s.Close() }()
	said := &head{}
	s.Stdin, s.Stdout, s.Stderr = in, out, said
	if errs != nil {
		s.Stderr = io.MultiWriter(errs, said)
	}
	stop := context.AfterFunc(ctx, func() { h.dropped(client) }) // Start waits for an answer
	err = s.Start(command)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		err = h.why(err)
		h.dropped(client)
		return fmt.Errorf("%s: %w", h.Name, err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Wait() }()
	select {
	case err = <-done:
	case <-ctx.Done():
		_ = s.Signal(ssh.SIGKILL)
		_ = s.Close()
		// A host without power never answers; what waits for it must end.
		select {
		case <-done:
		case <-time.After(2 * time.Second):
			h.dropped(client)
			<-done
		}
		return fmt.Errorf("%s: %q: %w: %s", h.Name, command, ctx.Err(), strings.TrimSpace(said.String()))
	}
	var exit *ssh.ExitError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &exit):
		status := exit.ExitStatus()
		if exit.Signal() != "" {
			status = -1
		}
		return &RunError{Host: h.Name, Command: command, Status: status, Stderr: said.String()}
	default:
		h.dropped(client)
		return fmt.Errorf("%s: %q: %w", h.Name, command, err)
	}
}

// session opens a session; a connection that died meanwhile is made anew once.
func (h *Host) session(ctx context.Context) (*ssh.Session, *ssh.Client, error) {
	for again := true; ; again = false {
		client, err := h.connection(ctx)
		if err != nil {
			return nil, nil, err
		}
		stop := context.AfterFunc(ctx, func() { h.dropped(client) })
		s, err := client.NewSession()
		if !stop() && err == nil {
			err = ctx.Err()
			_ = s.Close()
		}
		if err == nil {
			return s, client, nil
		}
		h.dropped(client)
		if !again || ctx.Err() != nil {
			return nil, nil, err
		}
	}
}

// Dial connects to a socket on the host: network is "tcp" or "unix". The
// connection has no deadlines of its own; it ends with Close.
func (h *Host) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	client, err := h.connection(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", h.Name, err)
	}
	stop := context.AfterFunc(ctx, func() { h.dropped(client) })
	c, err := client.Dial(network, address)
	if !stop() && err == nil {
		c.Close()
		err = ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %s: %w", h.Name, address, err)
	}
	return c, nil
}

// head keeps the first 64 KiB. It does not embed its buffer, whose ReadFrom
// would take everything.
type head struct{ kept bytes.Buffer }

// Write implements io.Writer; it takes everything.
func (t *head) Write(p []byte) (int, error) {
	if room := 64<<10 - t.kept.Len(); room > 0 {
		t.kept.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

// String returns what was kept.
func (t *head) String() string { return t.kept.String() }
