package server

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"

	"github.com/gpuctl/gpuctl/mmio/pciconf"
)

// The contents of a part are: a magic number, the length of a header, the header (JSON), its
// SHA-256, and the VGPU as package mediate saves it, which ends in a sum of its own. On a
// connection they are in chunks, each behind its length, and end with a length of 0: so who
// reads them knows whether that was all.
const (
	partMagic    = "gpuctl-part-1\n"
	stateVersion = 1
	maxHeader    = 4096
	maxChunk     = 64 << 10
)

// header is what is known of contents before they are read.
type header struct {
	Version  int    `json:"version"`
	Owner    string `json:"owner"`
	Seal     string `json:"seal"`
	Memory   uint64 `json:"memory"`
	Channels int    `json:"channels"`
	Mode     string `json:"mode"`
	Config   []byte `json:"config"` // the function's configuration space
}

func encodeHeader(w io.Writer, h header) error {
	text, err := json.Marshal(h)
	if err != nil {
		return err
	}
	b := binary.LittleEndian.AppendUint32([]byte(partMagic), uint32(len(text)))
	b = append(b, text...)
	sum := sha256.Sum256(text)
	_, err = w.Write(append(b, sum[:]...))
	return err
}

// decodeHeader reads a header. Errors wrap ErrState.
func decodeHeader(from io.Reader) (h header, err error) {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{ErrState}, args...)...)
	}
	head := make([]byte, len(partMagic)+4)
	if _, err := io.ReadFull(from, head); err != nil {
		return header{}, bad("%w", err)
	}
	n := binary.LittleEndian.Uint32(head[len(partMagic):])
	if string(head[:len(partMagic)]) != partMagic || n > maxHeader {
		return header{}, bad("it begins otherwise, or is another version's")
	}
	text := make([]byte, n+sha256.Size)
	if _, err := io.ReadFull(from, text); err != nil {
		return header{}, bad("%w", err)
	}
	text, sum := text[:n], text[n:]
	if want := sha256.Sum256(text); !bytes.Equal(sum, want[:]) {
		return header{}, bad("the sum of its header is another")
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&h); err != nil {
		return header{}, bad("%w", err)
	}
	if d.More() || h.Version != stateVersion || len(h.Config) != pciconf.Size || len(h.Seal) > 64 {
		return header{}, bad("version %d, and a configuration space of %d bytes", h.Version, len(h.Config))
	}
	return h, nil
}

// chunks writes in chunks.
type chunks struct{ to io.Writer }

func (c *chunks) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		part := p[:min(len(p), maxChunk)]
		b := binary.LittleEndian.AppendUint32(nil, uint32(len(part)))
		if _, err := c.to.Write(append(b, part...)); err != nil {
			return n, err
		}
		n, p = n+len(part), p[len(part):]
	}
	return n, nil
}

func (c *chunks) close() error {
	_, err := c.to.Write(make([]byte, 4))
	return err
}

// unchunk reads what chunks has written. What ends before its end is io.ErrUnexpectedEOF.
type unchunk struct {
	from io.Reader
	left uint32
	over bool
}

func (u *unchunk) Read(p []byte) (int, error) {
	for u.left == 0 {
		if u.over {
			return 0, io.EOF
		}
		var b [4]byte
		if _, err := io.ReadFull(u.from, b[:]); err != nil {
			return 0, fmt.Errorf("%w: %w", ErrState, io.ErrUnexpectedEOF)
		}
		u.left = binary.LittleEndian.Uint32(b[:])
		u.over = u.left == 0
		if u.left > maxChunk {
			return 0, fmt.Errorf("%w: a chunk of %d bytes", ErrState, u.left)
		}
	}
	n, err := u.from.Read(p[:min(uint64(len(p)), uint64(u.left))])
	u.left -= uint32(n)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}
