package cli

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

// expiresSoon is the remaining lifetime at which a certificate should have been renewed
// already.
const expiresSoon = 7 * 24 * time.Hour

func (a *app) clusterCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "cluster", Short: "Make, enter and look after a cluster of hosts",
		Example: `  gpuctl cluster init
  token=$(gpuctl cluster token create)   # then, on the next machine:
  gpuctl cluster join "$token"
  gpuctl cluster status`,
		Args: noSuchCommand, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		a.initCommand(), a.joinCommand(), a.loginCommand(), a.statusCommand(), a.tokenCommand(),
		a.queueCommand(), a.removeCommand(), a.identitiesCommand(), a.revokeCommand(),
	)
	return cmd
}

func (a *app) initCommand() *cobra.Command {
	req := &clusterv1.InitRequest{}
	cmd := &cobra.Command{
		Use: "init", Short: "Make a cluster of this host",
		Long:    "Make a cluster with this host as its first member. Others enter it with gpuctl\ncluster join and a token of gpuctl cluster token create.",
		Example: "  gpuctl cluster init --name h1 --address 192.0.2.1:7480",
		Args:    arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			res, err := call(cmd.Context(), c, c.Init, req)
			if err != nil {
				return err
			}
			return a.entered(res.GetStatus(), "made")
		},
	}
	cmd.Flags().StringVar(&req.Host, "name", "", "this host's `name` (default the machine's)")
	cmd.Flags().StringVar(&req.Address, "address", "", "`host:port` that the others reach it at (default as configured)")
	return cmd
}

func (a *app) joinCommand() *cobra.Command {
	req := &clusterv1.JoinRequest{}
	cmd := &cobra.Command{
		Use: "join TOKEN", Short: "Let this host enter a cluster",
		Long:    "Let this host enter a cluster, with a token that gpuctl cluster token create printed\non one of its hosts. With - the token is read from standard input, where no list of\nprocesses shows it.",
		Example: "  gpuctl cluster join \"$token\"\n  ssh h1 gpuctl cluster token create | gpuctl cluster join -",
		Args:    arguments(cobra.ExactArgs(1)), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			token, err := a.readToken(args[0])
			if err != nil {
				return err
			}
			req.Token = token
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			res, err := call(cmd.Context(), c, c.Join, req)
			if err != nil {
				return err
			}
			return a.entered(res.GetStatus(), "joined")
		},
	}
	cmd.Flags().StringVar(&req.Host, "name", "", "this host's `name` (default the machine's)")
	cmd.Flags().StringVar(&req.Address, "address", "", "`host:port` that the others reach it at (default as configured)")
	return cmd
}

// maxToken is the largest input that is read for a token, in bytes.
const maxToken = 16 << 10

func (a *app) readToken(arg string) (string, error) {
	if arg == "-" {
		data, err := io.ReadAll(io.LimitReader(a.In, maxToken+1))
		if err != nil {
			return "", fmt.Errorf("token: %w", err)
		}
		arg = string(data)
	}
	arg = strings.TrimSpace(arg)
	if arg == "" || len(arg) > maxToken {
		return "", cmdutil.Usage(errors.New("that is no token; gpuctl cluster token create prints one"))
	}
	return arg, nil
}

func (a *app) entered(s *clusterv1.StatusResponse, verb string) error {
	if err := a.result(view.Of(s), "%s cluster %s as host %s", verb, s.GetClusterId(), s.GetHost()); err != nil {
		return err
	}
	if verb == "made" {
		fmt.Fprintln(a.Err, "gpuctl cluster token create makes a token for the next host")
	}
	return nil
}

func (a *app) loginCommand() *cobra.Command {
	var as string
	cmd := &cobra.Command{
		Use: "login TOKEN", Short: "Enrol yourself, to use a cluster from this machine",
		Long:    "Enrol yourself with a token that an administrator made with gpuctl cluster token\ncreate --role. After that --host NAME and $GPUCTL_HOST reach the cluster. With - the\ntoken is read from standard input.",
		Example: "  gpuctl cluster login \"$token\" --as prod\n  gpuctl --host prod get gpus",
		Args:    arguments(cobra.ExactArgs(1)), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			token, err := a.readToken(args[0])
			if err != nil {
				return err
			}
			if a.remote == nil {
				return errors.New("this gpuctl was built without a way to other machines")
			}
			name, err := a.remote.Login(cmd.Context(), token, as)
			if err != nil {
				return fmt.Errorf("login: %w", err)
			}
			return a.result(map[string]string{"cluster": name}, "enrolled; gpuctl --host %s reaches the cluster", name)
		},
	}
	cmd.Flags().StringVar(&as, "as", "", "your `name` for the cluster (default the cluster's)")
	return cmd
}

func (a *app) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the cluster's members and what is wrong",
		Long:    "Show the cluster's members: who votes, who leads, who is healthy and how far each is\nbehind, and in words what is wrong. Without a leader the exit status is 4; with an alarm, as a VM that runs on two\nhosts, it is 1.",
		Example: "  gpuctl cluster status\n  gpuctl cluster status -o json",
		Args:    arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			s, err := call(cmd.Context(), c, c.Status, &clusterv1.StatusRequest{})
			if err != nil {
				return err
			}
			return a.printStatus(s)
		},
	}
}

func (a *app) printStatus(s *clusterv1.StatusResponse) error {
	if a.structured() {
		if err := a.print(view.Of(s)); err != nil {
			return err
		}
		return statusError(s)
	}
	if !s.GetJoined() && !s.GetStandalone() {
		return statusError(s)
	}
	what := s.GetClusterId()
	if s.GetStandalone() {
		what = strings.TrimSpace(what + " (this host alone, in memory)")
	}
	expires := ""
	if ms := s.GetCertificateExpiresUnixMs(); ms > 0 {
		left := time.UnixMilli(ms).Sub(a.now())
		switch {
		case left <= 0:
			expires = "expired " + span(-left) + " ago"
		case left < expiresSoon:
			expires = "expires in " + span(left) + ", and should have been renewed"
		default:
			expires = "expires in " + span(left)
		}
	}
	if err := a.pairs([][2]string{
		{"Cluster", what},
		{"Host", s.GetHost()},
		{"Leader", orWord(s.GetLeader(), "none")},
		{"Term", fmt.Sprintf("%d, entry %d committed, %d applied here", s.GetTerm(), s.GetCommitIndex(), s.GetAppliedIndex())},
		{"Protocol", strconv.Itoa(int(s.GetProtocol()))},
		{"Queue", queueWord(s.GetQueue())},
		{"Authority", s.GetCaFingerprint()},
		{"Certificate", expires},
		{"Message", s.GetMessage()},
		{"Alarm", strings.Join(s.GetAlarms(), "\n")},
	}); err != nil {
		return err
	}
	if len(s.GetMembers()) > 0 {
		if err := a.say(""); err != nil {
			return err
		}
		heading := []string{"HOST", "ADDRESS", "VOTER", "LEADER", "HEALTHY", "BEHIND", "VERSION", "WHAT IS WRONG"}
		if a.wide() {
			heading = append(heading, "LAST CONTACT", "ID")
		}
		var rows [][]string
		for _, m := range s.GetMembers() {
			row := []string{
				m.GetHost(), m.GetAddress(), yes(m.GetVoter()), yes(m.GetLeader()), yes(m.GetHealthy()), strconv.FormatUint(m.GetBehind(), 10),
				m.GetVersion(), wrong(m),
			}
			if a.wide() {
				row = append(row, span(time.Duration(m.GetLastContactMs())*time.Millisecond)+" ago", m.GetId())
			}
			rows = append(rows, row)
		}
		if err := table(a.Out, heading, rows); err != nil {
			return err
		}
	}
	return statusError(s)
}

func queueWord(q clusterv1.QueuePolicy) string {
	if q == clusterv1.QueuePolicy_QUEUE_POLICY_UNSPECIFIED {
		return "" // an older hostd
	}
	return view.Word(q)
}

// wrong returns in words what is wrong with a member; empty: nothing.
func wrong(m *clusterv1.MemberStatus) string {
	var all []string
	if !m.GetHealthy() {
		text := "unhealthy"
		if ms := m.GetLastContactMs(); ms > 0 {
			text = "no answer for " + span(time.Duration(ms)*time.Millisecond)
		}
		all = append(all, text)
	}
	if m.GetMessage() != "" {
		all = append(all, m.GetMessage())
	}
	return strings.Join(all, "; ")
}

// statusError returns what is wrong with the cluster as a whole, or nil.
func statusError(s *clusterv1.StatusResponse) error {
	voters, healthy := 0, 0
	for _, m := range s.GetMembers() {
		if m.GetVoter() {
			voters++
			if m.GetHealthy() {
				healthy++
			}
		}
	}
	switch {
	case len(s.GetAlarms()) > 0:
		return errors.New(clean(strings.Join(s.GetAlarms(), "; ")))
	case s.GetStandalone():
		return nil
	case !s.GetJoined():
		return errNotJoined(s.GetHost())
	case s.GetLeader() == "":
		return unavailable("the cluster has no leader: %d of %s are healthy, %d are needed; start the others, --stale reads without a leader", healthy, plural(voters, "voter", "voters"), voters/2+1)
	case !s.GetQuorum():
		return unavailable("the leader hears of too few voters to change anything: %d of %d are healthy, %d are needed; start the others, --stale reads without them", healthy, voters, voters/2+1)
	}
	return nil
}
