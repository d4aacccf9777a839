package pki

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const (
	addressesFile = "addresses"
	maxSavedHosts = 64
)

// Credentials are what a user needs to connect to a cluster.
type Credentials struct {
	Name      string   // the user's name for the cluster
	Addresses []string // host:port of some of the cluster's hosts
	Material  *Material
}

// Clusters is the folder with a user's credentials. It has one folder for each cluster,
// with addresses (one in each line), ca.crt, user.crt and user.key.
type Clusters struct{ path string }

// NewClusters returns the folder in $XDG_CONFIG_HOME, or in .config of $HOME (XDG Base
// Directory Specification).
func NewClusters(getenv func(string) string) (Clusters, error) {
	config := getenv("XDG_CONFIG_HOME")
	if !filepath.IsAbs(config) { // the specification says that relative paths are ignored
		home := getenv("HOME")
		if home == "" {
			return Clusters{}, errors.New("neither XDG_CONFIG_HOME nor HOME says where credentials are kept")
		}
		config = filepath.Join(home, ".config")
	}
	return Clusters{filepath.Join(config, "gpuctl", "clusters")}, nil
}

// Path returns the folder's path.
func (c Clusters) Path() string { return c.path }

func (c Clusters) dir(name string) (Dir, error) {
	if !ValidName(name) {
		return Dir{}, fmt.Errorf("cluster %q: %w (want letters, digits, '.', '_' and '-')", name, ErrIdentity)
	}
	return Dir{filepath.Join(c.path, name), "user"}, nil
}

// Save stores credentials, and replaces those of the same name. The addresses are written
// last, because List returns only folders with addresses.
func (c Clusters) Save(cr *Credentials) error {
	d, err := c.dir(cr.Name)
	if err != nil {
		return err
	}
	if len(cr.Addresses) == 0 || len(cr.Addresses) > maxSavedHosts {
		return fmt.Errorf("cluster %s: %d addresses (want 1 to %d)", cr.Name, len(cr.Addresses), maxSavedHosts)
	}
	for _, a := range cr.Addresses {
		if err := checkAddress(a); err != nil {
			return fmt.Errorf("cluster %s: %w", cr.Name, err)
		}
	}
	if err := d.Save(cr.Material); err != nil {
		return fmt.Errorf("cluster %s: %w", cr.Name, err)
	}
	return d.writeBytes(addressesFile, []byte(strings.Join(cr.Addresses, "\n")+"\n"), 0o600)
}

// Load returns the credentials with this name.
func (c Clusters) Load(name string) (*Credentials, error) {
	d, err := c.dir(name)
	if err != nil {
		return nil, err
	}
	data, err := readFile(d.file(addressesFile), false)
	if err != nil {
		return nil, fmt.Errorf("cluster %s: %w", name, err)
	}
	addresses, err := parseAddresses(data)
	if err != nil {
		return nil, fmt.Errorf("cluster %s: file %s: %w", name, d.file(addressesFile), err)
	}
	m, err := d.Load()
	if err != nil {
		return nil, fmt.Errorf("cluster %s: %w", name, err)
	}
	return &Credentials{name, addresses, m}, nil
}

// List returns the names of the clusters with credentials, sorted.
func (c Clusters) List() ([]string, error) {
	entries, err := os.ReadDir(c.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("credentials: %w", err)
	}
	var names []string
	for _, e := range entries {
		if _, err := os.Stat(filepath.Join(c.path, e.Name(), addressesFile)); err == nil && ValidName(e.Name()) {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, nil
}

// Remove deletes credentials. If there are none, there is no error.
func (c Clusters) Remove(name string) error {
	d, err := c.dir(name)
	if err != nil {
		return err
	}
	if err := os.RemoveAll(d.path); err != nil {
		return fmt.Errorf("cluster %s: %w", name, err)
	}
	return nil
}

func parseAddresses(data []byte) ([]string, error) {
	var out []string
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		if err := checkAddress(line); err != nil {
			return nil, err
		}
		out = append(out, line)
	}
	if len(out) == 0 || len(out) > maxSavedHosts {
		return nil, fmt.Errorf("%w: %d addresses (want 1 to %d)", ErrDamaged, len(out), maxSavedHosts)
	}
	return out, nil
}

// checkAddress checks that an address is host:port.
func checkAddress(address string) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil || host == "" || len(address) > maxAddress {
		return fmt.Errorf("address %.300q is not host:port", address)
	}
	for i := range len(host) {
		// Only characters of DNS names and of IP addresses with zones.
		if c := host[i]; c <= ' ' || c >= 0x7f || strings.IndexByte(`/\"'[]@?#`, c) >= 0 {
			return fmt.Errorf("address %.300q: the host has a %q", address, c)
		}
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("address %.300q: the port is not 1 to 65535", address)
	}
	return nil
}
