package server

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
)

// Park has no command of a part begin any more, waits for the one that runs, and returns the
// function's configuration space. Accesses are answered. It may be repeated; Resume is its
// undo.
func (c Client) Park(ctx context.Context, id string) (config []byte, err error) {
	all, err := c.call(ctx, request{Op: opPark, Part: Part{ID: id}})
	if err != nil {
		return nil, err
	}
	for _, st := range all {
		if st.ID == id {
			return st.Config, nil
		}
	}
	return nil, fmt.Errorf("%w: %s", ErrNotFound, id)
}

// Give ends a saved part's use on this host for good: another host has its contents, with
// that seal. It may be repeated. If the part was resumed since, the error wraps ErrRefused.
func (c Client) Give(ctx context.Context, id, seal string) error {
	_, err := c.call(ctx, request{Op: opGive, Part: Part{ID: id}, Seal: seal})
	return err
}

// Resume has a parked, saved or restored part work. It may be repeated. If the part was given,
// the error wraps ErrGiven.
func (c Client) Resume(ctx context.Context, id string) error {
	_, err := c.call(ctx, request{Op: opResume, Part: Part{ID: id}})
	return err
}

// Save seals a parked part, whose accesses wait from then on, and writes its contents. It may
// be repeated. After an error, what was written is worth nothing.
func (c Client) Save(ctx context.Context, id string, w io.Writer) error {
	conn, stop, err := c.open(ctx, request{Op: opSave, Part: Part{ID: id}})
	if err != nil {
		return err
	}
	defer stop()
	in := bufio.NewReaderSize(stalling{conn}, maxChunk)
	if err := readAnswer(in); err != nil {
		return c.failed(ctx, err)
	}
	if _, err := io.Copy(w, &unchunk{from: in}); err != nil {
		return c.failed(ctx, fmt.Errorf("contents of part %s: %w", id, err))
	}
	return nil
}

// Restore fills a part that awaits its contents. It works after Resume. Repeated before that,
// it fills it anew. Errors wrap ErrState if it is another VM's, another kind's, or damaged;
// then the part goes on awaiting.
func (c Client) Restore(ctx context.Context, id string, from io.Reader) error {
	conn, stop, err := c.open(ctx, request{Op: opRestore, Part: Part{ID: id}})
	if err != nil {
		return err
	}
	defer stop()
	out := bufio.NewWriterSize(stalling{conn}, maxChunk)
	w := &chunks{to: out}
	var late error // a part that refuses says so before it has read everything
	if n, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{from}, make([]byte, maxChunk)); err != nil {
		late = fmt.Errorf("contents of part %s, after %d bytes: %w", id, n, err)
	} else if err = w.close(); err != nil {
		late = err
	} else {
		late = out.Flush()
	}
	if late != nil {
		// Without the end of the contents the part is not restored.
		if u, ok := conn.(*net.UnixConn); ok {
			_ = u.CloseWrite()
		}
	}
	if err := readAnswer(bufio.NewReader(stalling{conn})); err != nil {
		return c.failed(ctx, errors.Join(err, late))
	}
	return late
}

func (c Client) failed(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	return fmt.Errorf("ask the process that has the GPU: %w", err)
}

// open sends a request.
func (c Client) open(ctx context.Context, r request) (net.Conn, func(), error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", c.Socket)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrNoServer, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	line, err := json.Marshal(r)
	if err == nil {
		_, err = (stalling{conn}).Write(append(line, '\n'))
	}
	if err != nil {
		stop()
		_ = conn.Close()
		return nil, nil, c.failed(ctx, err)
	}
	return conn, func() {
		stop()
		_ = conn.Close()
	}, nil
}

// maxError is the longest answer without parts.
const maxError = 16 << 10

func readAnswer(in *bufio.Reader) error {
	var line []byte
	for {
		b, err := in.ReadByte()
		if err != nil {
			return err
		}
		if line = append(line, b); b == '\n' {
			break
		}
		if len(line) > maxError {
			return errors.New("its answer has no end")
		}
	}
	var a answer
	if err := json.Unmarshal(bytes.TrimSpace(line), &a); err != nil {
		return err
	}
	return a.err()
}

// err is the error of an answer.
func (a answer) err() error {
	switch e := codes()[a.Code]; {
	case a.Error == "":
		return nil
	case e != nil:
		return fmt.Errorf("%w: %.500s", e, a.Error)
	}
	return fmt.Errorf("%.500s", a.Error)
}
