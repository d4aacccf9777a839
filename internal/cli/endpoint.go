package cli

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"

	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/internal/suggest"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
)

// Remote connects to hosts on other computers, with the user's credentials.
type Remote interface {
	// Client returns a client with the user's credentials, and the URL to use. host is
	// the name of a cluster in which the user is enrolled, or https://HOST:PORT of one of
	// its hosts.
	Client(host string) (client *http.Client, baseURL string, err error)
	// Clusters returns the clusters in which the user is enrolled.
	Clusters() ([]string, error)
	// Login enrols the user with a join token and stores the credentials. as is the
	// user's name for the cluster; empty: the cluster's own. It returns that name.
	Login(ctx context.Context, token, as string) (cluster string, err error)
}

// Option is an option of Run and Command.
type Option func(*app)

// WithRemote sets how gpuctl connects to other computers.
func WithRemote(r Remote) Option { return func(a *app) { a.remote = r } }

// clusterClient is a client of ClusterService.
type clusterClient = clusterv1connect.ClusterServiceClient

// errNoHost means that no daemon was named and none runs.
var errNoHost = errors.New("no hostd is running")

// endpoint is where a daemon answers: on a socket of this host, or remote.
type endpoint struct {
	socket string
	remote string
}

// named returns the value of --host or of the environment variable; empty: neither is
// set.
func (a *app) named() string {
	if a.host != "" {
		return a.host
	}
	return a.getenv("GPUCTL_HOST")
}

// find returns the daemon's endpoint. explicit reports whether the user has named it.
func (a *app) find() (at endpoint, explicit bool, err error) {
	if named := a.named(); named != "" {
		at, err := a.parseHost(named)
		return at, true, err
	}
	for _, path := range a.dirs.Sockets() {
		if !rundir.Answers(path) {
			continue
		}
		if err := a.dirs.Trusted(path); err != nil {
			fmt.Fprintf(a.Err, "gpuctl: the hostd at %s is not asked: %v\n", path, err)
			continue
		}
		return endpoint{socket: path}, false, nil
	}
	return endpoint{}, false, errNoHost
}

// parseHost parses unix://PATH, https://HOST:PORT, a path or a cluster's name.
func (a *app) parseHost(named string) (endpoint, error) {
	const want = "want unix://PATH, https://HOST:PORT or the name of a cluster (gpuctl cluster login)"
	path, unix := strings.CutPrefix(named, "unix://")
	switch {
	case unix && path == "":
		return endpoint{}, cmdutil.Usage(fmt.Errorf("host %q: %s", named, want))
	case unix:
		return endpoint{socket: path}, nil
	case strings.HasPrefix(named, "https://"):
		return endpoint{remote: named}, nil
	case strings.Contains(named, "://"):
		return endpoint{}, cmdutil.Usage(fmt.Errorf("host %q: %s", named, want))
	case strings.Contains(named, "/"):
		return endpoint{socket: named}, nil
	}
	var clusters []string
	if a.remote != nil {
		var err error
		if clusters, err = a.remote.Clusters(); err != nil {
			return endpoint{}, err
		}
	}
	if slices.Contains(clusters, named) {
		return endpoint{remote: named}, nil
	}
	if _, err := os.Stat(named); err == nil {
		return endpoint{socket: named}, nil
	}
	return endpoint{}, cmdutil.Usage(fmt.Errorf("host %q: you are enrolled in no cluster of that name%s; %s", named, suggest.Hint(named, clusters), want))
}

// socket returns the socket of this host's daemon.
func (a *app) socket() (path string, explicit bool, err error) {
	at, explicit, err := a.find()
	if err == nil && at.remote != "" {
		err = cmdutil.Usage(fmt.Errorf("host %s is another machine, and applications run on this one: leave --host and $GPUCTL_HOST out", at.remote))
	}
	return at.socket, explicit, err
}

// dialer returns an HTTP client for the daemon, or for the only private one.
func (a *app) dialer() (*http.Client, string, error) {
	at, _, err := a.find()
	switch {
	case errors.Is(err, errNoHost):
		private := a.dirs.PrivateSockets()
		switch len(private) {
		case 0:
			return nil, "", cmdutil.WithCode(fmt.Errorf("%w (no socket at %s); start hostd --dev, or an application with gpuctl run", errNoHost, strings.Join(a.dirs.Sockets(), ", ")), exitUnavailable)
		case 1:
			at.socket = private[0]
		default:
			return nil, "", fmt.Errorf("%d private daemons are running; name one with --host unix://PATH: %s", len(private), strings.Join(private, ", "))
		}
	case err != nil:
		return nil, "", err
	case at.remote != "" && a.remote == nil:
		return nil, "", fmt.Errorf("host %s: this gpuctl was built without a way to other machines", at.remote)
	case at.remote != "":
		return a.remote.Client(at.remote)
	}
	return unixrpc.Client(at.socket), "http://host", nil
}

// connect returns a client of the daemon, or of the only private one.
func (a *app) connect() (client, error) {
	h, url, err := a.dialer()
	if err != nil {
		return nil, err
	}
	return gpuctlv1connect.NewHostServiceClient(h, url, a.patience()), nil
}

// connectCluster returns a client of the same daemon's ClusterService.
func (a *app) connectCluster() (clusterClient, error) {
	h, url, err := a.dialer()
	if err != nil {
		return nil, err
	}
	return clusterv1connect.NewClusterServiceClient(h, url, a.patience()), nil
}

func (a *app) dial(path string) client {
	return gpuctlv1connect.NewHostServiceClient(unixrpc.Client(path), "http://host", a.patience())
}
