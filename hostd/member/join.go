package member

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/cluster/remote"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/hostd/member/clusterapi"
	"github.com/gpuctl/gpuctl/internal/durable"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/wait"
)

// ErrMember means that this host is already in a cluster.
var ErrMember = fmt.Errorf("%w: gpuctl cluster status shows which", replica.ErrExists)

const joinTimeout = time.Minute

// begin checks that the host can become a member, and opens its port, so that a port that
// is in use is noticed before anything is written. The caller unlocks n.joining.
func (n *Node) begin(ctx context.Context, name, address string) (id identity, l net.Listener, err error) {
	if n.Dir == "" {
		return id, nil, errors.New("hostd --dev is a cluster of one in memory; run hostd as a service to make or join a cluster")
	}
	if n.member() != nil {
		return id, nil, ErrMember
	}
	name = cmp.Or(name, n.Name)
	var lc net.ListenConfig
	if l, err = lc.Listen(ctx, "tcp", n.Listen); err != nil {
		return id, nil, fmt.Errorf("port: %w; hostd's configuration (cluster.listen) names another", err)
	}
	address = cmp.Or(address, n.Advertise)
	if address == "" {
		if address, err = n.reachable(ctx, l); err != nil {
			l.Close()
			return id, nil, err
		}
	}
	if _, _, err := net.SplitHostPort(address); err != nil {
		l.Close()
		return id, nil, fmt.Errorf("address %q: %w", address, err)
	}
	// Files of a join that was not completed are of no use.
	for _, left := range []string{"raft", "pki"} {
		if err := os.RemoveAll(filepath.Join(n.Dir, left)); err != nil {
			l.Close()
			return id, nil, fmt.Errorf("data folder: %w", err)
		}
	}
	if id, err = n.newIdentity(); err != nil {
		l.Close()
		return id, nil, err
	}
	id.Host, id.Address = name, address
	return id, l, nil
}

// newIdentity returns the identity of a join that was not completed, or makes a new one,
// and writes it to disk. So a host that was admitted and then crashed tries again with
// the same id. With another id, its name and address would be taken.
func (n *Node) newIdentity() (id identity, err error) {
	data, err := os.ReadFile(beginningPath(n.Dir))
	if err == nil && json.Unmarshal(data, &id) == nil && id.Version == identityVersion && id.ID != "" {
		return identity{ID: id.ID}, nil
	}
	id = identity{Version: identityVersion, ID: "h-" + random.Hex(8)}
	if data, err = json.Marshal(id); err != nil {
		return id, fmt.Errorf("membership: %w", err)
	}
	if err := durable.Replace(beginningPath(n.Dir), data, 0o600); err != nil {
		return id, fmt.Errorf("membership: %w", err)
	}
	return id, nil
}

// reachable returns the listener's port at an address of this host that other hosts can
// reach, which loopback is not.
func (n *Node) reachable(ctx context.Context, l net.Listener) (string, error) {
	host, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return "", fmt.Errorf("port: %w", err)
	}
	if ip := net.ParseIP(host); ip != nil && !ip.IsUnspecified() {
		return net.JoinHostPort(host, port), nil
	}
	h, _, err := n.served.Host.Report(ctx)
	if err != nil {
		return "", fmt.Errorf("network: %w", err)
	}
	for _, nic := range h.GetNics() {
		for _, prefix := range nic.GetIps() {
			if ip, _, err := net.ParseCIDR(prefix); err == nil && ip.IsGlobalUnicast() {
				return net.JoinHostPort(ip.String(), port), nil
			}
		}
	}
	return "", errors.New("this host has no address at which others reach it: say --address HOST:PORT")
}

// Init makes a new cluster with this host as its only member. Errors wrap ErrMember.
func (n *Node) Init(ctx context.Context, r *clusterv1.InitRequest) error {
	n.joining.Lock()
	defer n.joining.Unlock()
	id, l, err := n.begin(ctx, r.GetHost(), r.GetAddress())
	if err != nil {
		return err
	}
	id.Cluster, id.Found = random.Hex(8), true
	now := time.Now()
	key, csr, err := newRequest()
	if err == nil {
		err = n.foundPKI(id, key, csr, now)
	}
	if err == nil {
		err = id.write(n.Dir)
	}
	if err != nil {
		l.Close()
		return err
	}
	if err := n.start(ctx, id, l); err != nil {
		return errors.Join(err, n.forget())
	}
	return n.begun()
}

// begun removes the file of the incomplete membership: it is complete now.
func (n *Node) begun() error {
	if err := os.Remove(beginningPath(n.Dir)); err != nil && !missing(err) {
		return fmt.Errorf("data folder: %w", err)
	}
	return nil
}

func (n *Node) foundPKI(id identity, key *ecdsa.PrivateKey, csr []byte, now time.Time) error {
	ca, err := pki.NewCA(id.Cluster, now)
	if err != nil {
		return err
	}
	cert, err := ca.Sign(csr, pki.HostIdentity(id.ID, id.Host, id.Address, pki.NewEnrolment()), now)
	if err != nil {
		return err
	}
	return n.savePKI(ca, cert, key)
}

func (n *Node) savePKI(ca *pki.CA, cert []byte, key *ecdsa.PrivateKey) error {
	material, err := pki.NewMaterial(cert, ca.Certificate().Raw, key)
	if err != nil {
		return err
	}
	if err := n.pki().SaveCA(ca); err != nil {
		return err
	}
	return n.pki().Save(material)
}

func newRequest() (*ecdsa.PrivateKey, []byte, error) {
	key, err := pki.NewKey()
	if err != nil {
		return nil, nil, err
	}
	csr, err := pki.NewRequest(key)
	return key, csr, err
}

// forget removes node.json of a membership that was not completed.
func (n *Node) forget() error {
	if err := os.Remove(identityPath(n.Dir)); err != nil && !missing(err) {
		return fmt.Errorf("data folder: %w", err)
	}
	return nil
}

// Join makes this host a member of the token's cluster. Errors wrap ErrMember.
func (n *Node) Join(ctx context.Context, r *clusterv1.JoinRequest) error {
	n.joining.Lock()
	defer n.joining.Unlock()
	token, err := pki.DecodeToken(r.GetToken())
	if err != nil {
		return err
	}
	if token.Role != clusterv1.Role_ROLE_HOST {
		return fmt.Errorf("%w: it is for a user (gpuctl cluster login), not for a host", pki.ErrTokenMalformed)
	}
	id, l, err := n.begin(ctx, cmp.Or(r.GetHost(), token.Name), r.GetAddress())
	if err != nil {
		return err
	}
	key, csr, err := newRequest()
	if err != nil {
		l.Close()
		return err
	}
	// As soon as the leader has admitted this host, it may connect to it.
	res, err := remote.Enroll(ctx, token, &clusterv1.EnrollRequest{Csr: csr, Host: id.Host, HostId: id.ID, Address: id.Address, Protocol: state.Protocol})
	if err != nil {
		l.Close()
		return clusterapi.Uncoded(err)
	}
	id.Cluster = res.GetClusterId()
	err = n.joined(token, id, res, key)
	if err != nil {
		l.Close()
		return err
	}
	if err := n.start(ctx, id, l); err != nil {
		return errors.Join(err, n.forget())
	}
	if err := n.begun(); err != nil {
		return err
	}
	return n.await(ctx)
}

func (n *Node) joined(token pki.Token, id identity, res *clusterv1.EnrollResponse, key *ecdsa.PrivateKey) error {
	caKey, err := pki.Unseal(token.Secret[:], res.GetCaKey())
	if err != nil {
		return fmt.Errorf("the cluster's authority: %w", err)
	}
	ca, err := pki.ParseCA(res.GetCa(), caKey)
	if err != nil {
		return fmt.Errorf("the cluster's authority: %w", err)
	}
	if err := n.savePKI(ca, res.GetCertificate(), key); err != nil {
		return err
	}
	return id.write(n.Dir)
}

// await waits until the cluster's state has reached this host.
func (n *Node) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	for n.known() == nil {
		if ctx.Err() != nil {
			return fmt.Errorf("this host was let in, but has not heard of the cluster's leader for %v: check that %s reaches it; it goes on trying", joinTimeout, n.member().Address)
		}
		_ = wait.For(ctx, 20*time.Millisecond)
	}
	return nil
}
