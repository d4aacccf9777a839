package pki

import (
	"bytes"
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/gpuctl/gpuctl/internal/durable"
)

const (
	maxFile    = 64 << 10
	typeCert   = "CERTIFICATE"
	typeKey    = "PRIVATE KEY"
	caCertFile = "ca.crt"
	caKeyFile  = "ca.key"
)

// Dir is a folder with the authority's certificate, its key if this host may sign, and a
// certificate with its key.
type Dir struct {
	path string
	stem string
}

// NewDir returns a host's folder. Its files are ca.crt, ca.key, node.crt and node.key.
func NewDir(path string) Dir { return Dir{path, "node"} }

// Path returns the folder's path.
func (d Dir) Path() string { return d.path }

func (d Dir) file(name string) string { return filepath.Join(d.path, name) }
func (d Dir) certFile() string        { return d.stem + ".crt" }
func (d Dir) keyFile() string         { return d.stem + ".key" }
func (d Dir) nextFile() string        { return d.stem + ".key.next" }

// SaveCA stores an authority with its key.
func (d Dir) SaveCA(ca *CA) error {
	der, err := ca.KeyDER()
	if err != nil {
		return err
	}
	if err := d.make(); err != nil {
		return err
	}
	if err := d.write(caKeyFile, typeKey, der, 0o600); err != nil {
		return err
	}
	return d.write(caCertFile, typeCert, ca.cert.Raw, 0o644)
}

// LoadCA reads the authority with its key.
func (d Dir) LoadCA() (*CA, error) {
	cert, err := d.pemFile(caCertFile, typeCert, false)
	if err != nil {
		return nil, err
	}
	key, err := d.pemFile(caKeyFile, typeKey, true)
	if err != nil {
		return nil, err
	}
	ca, err := ParseCA(cert, key)
	if err != nil {
		return nil, fmt.Errorf("folder %s: %w", d.path, err)
	}
	return ca, nil
}

// Save stores a certificate with its key and authority. After a crash at any point, the
// folder has a certificate with the key that belongs to it.
func (d Dir) Save(m *Material) error {
	key, err := x509.MarshalPKCS8PrivateKey(m.Certificate.PrivateKey)
	if err != nil {
		return fmt.Errorf("key of %s: %w", m.Peer, err)
	}
	if err := d.make(); err != nil {
		return err
	}
	if err := d.write(d.nextFile(), typeKey, key, 0o600); err != nil {
		return err
	}
	if old, err := d.pemFile(caCertFile, typeCert, false); err != nil || !bytes.Equal(old, m.CA.Raw) {
		if err := d.write(caCertFile, typeCert, m.CA.Raw, 0o644); err != nil {
			return err
		}
	}
	if err := d.write(d.certFile(), typeCert, m.Certificate.Leaf.Raw, 0o644); err != nil {
		return err
	}
	return d.finish()
}

// finish replaces the key by the next key.
func (d Dir) finish() error {
	if err := os.Rename(d.file(d.nextFile()), d.file(d.keyFile())); err != nil {
		return fmt.Errorf("key: %w", err)
	}
	return d.sync()
}

// Load reads the certificate with its key and authority. The error wraps fs.ErrNotExist
// if there is none yet.
func (d Dir) Load() (*Material, error) {
	ca, err := d.pemFile(caCertFile, typeCert, false)
	if err != nil {
		return nil, err
	}
	cert, err := d.pemFile(d.certFile(), typeCert, false)
	if err != nil {
		return nil, err
	}
	key, err := d.pemFile(d.keyFile(), typeKey, true)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	next, nextErr := d.pemFile(d.nextFile(), typeKey, true)
	if key == nil && next == nil {
		return nil, err
	}
	m, second, err := assemble(ca, cert, key, next)
	if err != nil {
		return nil, fmt.Errorf("folder %s: %w", d.path, errors.Join(err, ignoreMissing(nextErr)))
	}
	if second {
		if err := d.finish(); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return m, nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// assemble tries the key, then the next key of an interrupted Save. second reports that
// the next key is right.
func assemble(ca, cert, key, next []byte) (m *Material, second bool, err error) {
	err = fmt.Errorf("key: %w", fs.ErrNotExist)
	for i, der := range [][]byte{key, next} {
		if der == nil {
			continue
		}
		signer, parseErr := parseKey(der)
		if parseErr == nil {
			if m, parseErr = NewMaterial(cert, ca, signer); parseErr == nil {
				return m, i == 1, nil
			}
		}
		if i == 0 || key == nil {
			err = parseErr
		}
	}
	return nil, false, err
}

func parseKey(der []byte) (crypto.Signer, error) {
	key, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return nil, fmt.Errorf("key: %w: %w", ErrDamaged, err)
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("key: %w: it cannot sign", ErrDamaged)
	}
	if err := checkKey(signer.Public()); err != nil {
		return nil, fmt.Errorf("key: %w: %w", ErrDamaged, err)
	}
	return signer, nil
}

// parsePEM returns the content of a file with exactly one PEM block.
func parsePEM(data []byte, kind string) ([]byte, error) {
	block, rest := pem.Decode(data)
	switch {
	case len(data) == 0:
		return nil, fmt.Errorf("%w: empty", ErrDamaged)
	case block == nil:
		return nil, fmt.Errorf("%w: no PEM block, or one that is cut short", ErrDamaged)
	case block.Type != kind:
		return nil, fmt.Errorf("%w: a %.40q, not a %s", ErrDamaged, block.Type, kind)
	case len(bytes.TrimSpace(rest)) != 0:
		return nil, fmt.Errorf("%w: something follows the %s", ErrDamaged, kind)
	case len(block.Bytes) == 0:
		return nil, fmt.Errorf("%w: an empty %s", ErrDamaged, kind)
	}
	return block.Bytes, nil
}

func (d Dir) pemFile(name, kind string, private bool) ([]byte, error) {
	data, err := readFile(d.file(name), private)
	if err != nil {
		return nil, err
	}
	der, err := parsePEM(data, kind)
	if err != nil {
		return nil, fmt.Errorf("file %s: %w", d.file(name), err)
	}
	return der, nil
}

// readFile reads a small file. A private one must be accessible by its owner only.
func readFile(path string, private bool) ([]byte, error) {
	// Non-blocking, so that a pipe in the file's place does not block.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("file %s: %w: not a regular file", path, ErrDamaged)
	}
	if private {
		if perm := info.Mode().Perm(); perm&0o077 != 0 {
			return nil, fmt.Errorf("file %s: %w (mode %04o); if nobody has copied it: chmod 600 %s", path, ErrPermissions, perm, path)
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok && int(st.Uid) != os.Geteuid() && st.Uid != 0 {
			return nil, fmt.Errorf("file %s: %w: it belongs to uid %d", path, ErrPermissions, st.Uid)
		}
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("file %s: %w", path, err)
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("file %s: %w: larger than %d bytes", path, ErrDamaged, maxFile)
	}
	return data, nil
}

func (d Dir) make() error {
	if err := os.MkdirAll(d.path, 0o700); err != nil {
		return fmt.Errorf("folder of certificates: %w", err)
	}
	return nil
}

func (d Dir) write(name, kind string, der []byte, perm fs.FileMode) error {
	return d.writeBytes(name, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), perm)
}

func (d Dir) writeBytes(name string, data []byte, perm fs.FileMode) error {
	if err := durable.Replace(d.file(name), data, perm); err != nil {
		return fmt.Errorf("file %s: %w", d.file(name), err)
	}
	return nil
}

// sync makes renames durable.
func (d Dir) sync() error {
	f, err := os.Open(d.path)
	if err != nil {
		return fmt.Errorf("folder of certificates: %w", err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("folder %s: %w", d.path, err)
	}
	return nil
}

// stamp returns a text that changes when a file of the material changes.
func (d Dir) stamp() string {
	var b bytes.Buffer
	for _, name := range []string{caCertFile, d.certFile(), d.keyFile()} {
		info, err := os.Stat(d.file(name))
		if err != nil {
			b.WriteString("-;")
			continue
		}
		var inode uint64
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			inode = st.Ino
		}
		fmt.Fprintf(&b, "%d %d %d;", info.ModTime().UnixNano(), info.Size(), inode)
	}
	return b.String()
}
