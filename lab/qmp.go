package lab

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"
)

// qmp is one conversation with a QEMU over its machine protocol.
type qmp struct {
	conn net.Conn
	in   *bufio.Reader
}

// maxQMP bounds one message, in bytes.
const maxQMP = 1 << 20

// qmpError is what QEMU answers when it refuses.
type qmpError struct {
	Class string `json:"class"`
	Desc  string `json:"desc"`
}

// Error implements error.
func (e *qmpError) Error() string { return e.Desc }

// dialQMP connects to the socket at path. QEMU serves one client at a time.
func dialQMP(ctx context.Context, path string) (*qmp, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("connect to QEMU: %w", err)
	}
	q := &qmp{conn: conn, in: bufio.NewReaderSize(conn, 64<<10)}
	if _, err := q.read(ctx); err != nil { // the greeting
		conn.Close()
		return nil, fmt.Errorf("QEMU at %s: %w", path, err)
	}
	if _, err := q.do(ctx, "qmp_capabilities", nil); err != nil {
		conn.Close()
		return nil, err
	}
	return q, nil
}

// close ends the conversation, not QEMU.
func (q *qmp) close() { q.conn.Close() }

type qmpMessage struct {
	Return json.RawMessage `json:"return"`
	Error  *qmpError       `json:"error"`
	Event  string          `json:"event"`
}

func (q *qmp) read(ctx context.Context) (*qmpMessage, error) {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(5 * time.Minute)
	}
	if err := q.conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = q.conn.SetDeadline(time.Now()) })
	defer stop()
	var line []byte
	for {
		part, err := q.in.ReadSlice('\n')
		line = append(line, part...)
		if len(line) > maxQMP {
			return nil, fmt.Errorf("a message of more than %d bytes", maxQMP)
		}
		if err == bufio.ErrBufferFull { //nolint:errorlint // it is never wrapped
			continue
		}
		if err != nil {
			switch {
			case ctx.Err() != nil:
				err = ctx.Err()
			case ok && errors.Is(err, os.ErrDeadlineExceeded): // a little before the context's own
				err = context.DeadlineExceeded
			}
			return nil, err
		}
		break
	}
	m := new(qmpMessage)
	return m, json.Unmarshal(line, m)
}

// do runs one command and returns its answer.
func (q *qmp) do(ctx context.Context, command string, args map[string]any) (json.RawMessage, error) {
	b, err := json.Marshal(struct {
		Execute   string         `json:"execute"`
		Arguments map[string]any `json:"arguments,omitempty"`
	}{command, args})
	if err != nil {
		return nil, err
	}
	if err := q.conn.SetWriteDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return nil, err
	}
	if _, err := q.conn.Write(append(b, '\n')); err != nil {
		return nil, fmt.Errorf("QEMU %s: %w", command, err)
	}
	for {
		m, err := q.read(ctx)
		switch {
		case err != nil:
			return nil, fmt.Errorf("QEMU %s: %w", command, err)
		case m.Event != "":
		case m.Error != nil:
			return nil, fmt.Errorf("QEMU %s: %w", command, m.Error)
		default:
			return m.Return, nil
		}
	}
}

// monitor runs a command of the human monitor, where what it prints is its error.
func (q *qmp) monitor(ctx context.Context, line string) error {
	out, err := q.do(ctx, "human-monitor-command", map[string]any{"command-line": line})
	if err != nil {
		return err
	}
	var text string
	if err := json.Unmarshal(out, &text); err != nil {
		return fmt.Errorf("QEMU %q: %w", line, err)
	}
	if text != "" {
		return fmt.Errorf("QEMU %q: %s", line, text)
	}
	return nil
}
