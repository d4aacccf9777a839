package remote

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/user"
	"strings"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/pki"
)

const (
	nextAddress  = 2 * time.Second // time after which the next host is tried
	renewTimeout = 3 * time.Second
)

// User connects to the clusters in which a user is enrolled.
type User struct {
	clusters pki.Clusters
	now      func() time.Time
}

// NewUser finds the user's credentials; see pki.NewClusters.
func NewUser(getenv func(string) string) (*User, error) {
	c, err := pki.NewClusters(getenv)
	if err != nil {
		return nil, err
	}
	return &User{c, time.Now}, nil
}

// Clusters returns the names of the clusters in which the user is enrolled.
func (u *User) Clusters() ([]string, error) { return u.clusters.List() }

// Client returns a client with the credentials for a cluster, and the URL to use. host is
// a cluster's name, or https://HOST:PORT of one of its hosts.
func (u *User) Client(host string) (*http.Client, string, error) {
	credentials, err := u.credentials(host)
	if err != nil {
		return nil, "", err
	}
	addresses := credentials.Addresses
	if address, ok := strings.CutPrefix(host, "https://"); ok {
		addresses = []string{strings.TrimSuffix(address, "/")}
	}
	c := u.client(credentials.Material, addresses)
	peer := credentials.Material.Peer
	if peer.NotAfter.Sub(u.now()) < peer.NotAfter.Sub(peer.NotBefore)/3 {
		// If the renewal fails, the present certificate is used.
		if renewed, err := u.renew(c, credentials); err == nil {
			c.CloseIdleConnections()
			c = u.client(renewed, addresses)
		}
	}
	return c, "https://" + addresses[0], nil
}

// credentials returns the credentials for a cluster's name, or for the cluster that lists
// an address. If there is only one cluster, an address belongs to that one.
func (u *User) credentials(host string) (*pki.Credentials, error) {
	address, isAddress := strings.CutPrefix(host, "https://")
	if !isAddress {
		return u.clusters.Load(host)
	}
	names, err := u.clusters.List()
	if err != nil {
		return nil, err
	}
	var only *pki.Credentials
	for _, name := range names {
		c, err := u.clusters.Load(name)
		if err != nil {
			return nil, err
		}
		for _, a := range c.Addresses {
			if a == strings.TrimSuffix(address, "/") {
				return c, nil
			}
		}
		only = c
	}
	switch len(names) {
	case 1:
		return only, nil
	case 0:
		return nil, errors.New("you are enrolled in no cluster: ask an administrator for a token (gpuctl cluster token create --role viewer) and say gpuctl cluster login TOKEN")
	}
	return nil, fmt.Errorf("host %s: none of your clusters (%s) lists it: say --host with the cluster's name", host, strings.Join(names, ", "))
}

// client returns a client that tries the addresses one after the other.
func (u *User) client(m *pki.Material, addresses []string) *http.Client {
	config := pki.Trust{Provider: m, Now: u.now}.ClientConfig("")
	t := transport(config, defaultPing)
	config = t.TLSClientConfig
	t.DialTLSContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
		var errs []error
		for i, address := range addresses {
			conn, err := dial(ctx, network, address, config, i < len(addresses)-1)
			if err == nil {
				return conn, nil
			}
			errs = append(errs, fmt.Errorf("host %s: %w", address, err))
		}
		return nil, errors.Join(errs...)
	}
	return newClient(t)
}

func dial(ctx context.Context, network, address string, config *tls.Config, more bool) (net.Conn, error) {
	limit := dialTimeout
	if more {
		limit = nextAddress
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	d := tls.Dialer{NetDialer: &net.Dialer{}, Config: config}
	return d.DialContext(ctx, network, address)
}

func (u *User) renew(c *http.Client, old *pki.Credentials) (*pki.Material, error) {
	ctx, cancel := context.WithTimeout(context.Background(), renewTimeout)
	defer cancel()
	key, err := pki.NewKey()
	if err != nil {
		return nil, err
	}
	csr, err := pki.NewRequest(key)
	if err != nil {
		return nil, err
	}
	res, err := Peer(c, old.Addresses[0]).Renew(ctx, connect.NewRequest(&clusterv1.RenewRequest{Csr: csr}))
	if err != nil {
		return nil, err
	}
	m, err := pki.NewMaterial(res.Msg.GetCertificate(), res.Msg.GetCa(), key)
	if err != nil {
		return nil, err
	}
	return m, u.clusters.Save(&pki.Credentials{Name: old.Name, Addresses: old.Addresses, Material: m})
}

// Login enrols the user with a join token and stores the credentials under a name: the
// cluster's own if as is empty. It returns that name.
func (u *User) Login(ctx context.Context, text, as string) (string, error) {
	token, err := pki.DecodeToken(text)
	if err != nil {
		return "", err
	}
	if token.Role == clusterv1.Role_ROLE_HOST {
		return "", fmt.Errorf("%w: it is for a host (gpuctl cluster join, on the host), not for a user", pki.ErrTokenMalformed)
	}
	name := token.Name
	if name == "" {
		if name, err = userName(); err != nil {
			return "", err
		}
	}
	key, err := pki.NewKey()
	if err != nil {
		return "", err
	}
	csr, err := pki.NewRequest(key)
	if err != nil {
		return "", err
	}
	res, err := Enroll(ctx, token, &clusterv1.EnrollRequest{Csr: csr, Host: name})
	if err != nil {
		return "", err
	}
	m, err := pki.NewMaterial(res.GetCertificate(), res.GetCa(), key)
	if err != nil {
		return "", err
	}
	as = cmp.Or(as, res.GetClusterId())
	addresses := res.GetAddresses()
	if len(addresses) == 0 {
		addresses = token.Addresses
	}
	return as, u.clusters.Save(&pki.Credentials{Name: as, Addresses: addresses, Material: m})
}

// userName returns a name that includes the computer's, so that users with the same name
// on different computers differ.
func userName() (string, error) {
	who, err := user.Current()
	if err != nil {
		return "", fmt.Errorf("user name: %w", err)
	}
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("host name: %w", err)
	}
	return who.Username + "@" + host, nil
}
