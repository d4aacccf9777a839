package capture

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"
	"unicode/utf8"
)

// ErrArchive means that an archive was not made by Write, or is invalid.
var ErrArchive = errors.New("not a capture of a host")

// Archive is an opened archive. Its files are in memory.
type Archive struct {
	Manifest Manifest
	Facts    map[string][]byte // output of commands, by their names in the manifest
	host     *FS
	total    int // bytes; sparse files are counted with their full size
}

// Host returns the host's files. They are read-only.
func (a *Archive) Host() *FS { return a.host }

// Open reads an archive from any source. Errors wrap ErrArchive.
func Open(r io.Reader) (*Archive, error) {
	a, err := open(r)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrArchive, err)
	}
	return a, nil
}

func open(r io.Reader) (*Archive, error) {
	z, err := gzip.NewReader(r)
	if err != nil {
		return nil, err
	}
	// Highly compressed data grows a thousandfold, so the limit is on the uncompressed
	// size, including headers.
	left := &bounded{r: z, left: maxTotal}
	t := tar.NewReader(left)
	a := &Archive{Facts: map[string][]byte{}, host: newFS()}
	for n := 0; ; n++ {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if n >= maxEntries {
			return nil, fmt.Errorf("more than %d entries", maxEntries)
		}
		if err := checkName(h.Name); err != nil {
			return nil, err
		}
		if (n == 0) != (h.Name == manifestName) {
			return nil, fmt.Errorf("%s is first, and nothing else", manifestName)
		}
		if err := a.add(h, t); err != nil {
			return nil, fmt.Errorf("%.100q: %w", h.Name, err)
		}
	}
	if a.Manifest.Format == 0 {
		return nil, errors.New("empty")
	}
	return a, nil
}

func checkName(name string) error {
	if !fs.ValidPath(name) || name == "." || len(name) > maxPath || strings.Count(name, "/") >= maxParts || !utf8.ValidString(name) || strings.ContainsAny(name, "\x00\\") {
		return fmt.Errorf("name %.100q", name)
	}
	return nil
}

func (a *Archive) add(h *tar.Header, r io.Reader) error {
	host, isHost := strings.CutPrefix(h.Name, rootDir+"/")
	fact, isFact := strings.CutPrefix(h.Name, factsDir+"/")
	switch {
	case h.Typeflag == tar.TypeSymlink && isHost:
		return a.host.symlink(host, h.Linkname)
	case h.Typeflag != tar.TypeReg:
		return fmt.Errorf("is of type %q", h.Typeflag)
	}
	most := int64(maxFact)
	if isHost {
		most = maxHostFile
	}
	if h.Size > most {
		return fmt.Errorf("has %d bytes, more than %d", h.Size, most)
	}
	data, err := io.ReadAll(r) // ends after the size in the header
	if err != nil {
		return err
	}
	if a.total += len(data); a.total > maxTotal {
		return fmt.Errorf("unpacks to more than %d bytes", maxTotal)
	}
	switch {
	case isHost:
		return a.host.file(host, data)
	case isFact:
		if a.Facts[fact] != nil {
			return errors.New("is there twice")
		}
		a.Facts[fact] = data
		return nil
	case h.Name == manifestName:
		d := json.NewDecoder(bytes.NewReader(data))
		if err := d.Decode(&a.Manifest); err != nil {
			return err
		}
		if a.Manifest.Format != Format {
			return fmt.Errorf("has format %d, and this gpuctl knows %d", a.Manifest.Format, Format)
		}
		return nil
	}
	return errors.New("is neither the host's nor a fact")
}

// bounded returns an error where io.LimitReader would return io.EOF.
type bounded struct {
	r    io.Reader
	left int64
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, fmt.Errorf("unpacks to more than %d bytes", maxTotal)
	}
	n, err := b.r.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

// checkLink returns an error if the text of a link leads out of the root. If it leads
// through other links, lookup checks it.
func checkLink(name, target string) error {
	if target == "" || len(target) > maxPath || path.IsAbs(target) || !utf8.ValidString(target) || strings.ContainsAny(target, "\x00\\") {
		return fmt.Errorf("links to %.100q", target)
	}
	if to := path.Join(path.Dir(name), target); !fs.ValidPath(to) {
		return fmt.Errorf("links to %.100q, outside the archive", target)
	}
	return nil
}
