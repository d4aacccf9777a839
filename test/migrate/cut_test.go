package migrate

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/test/libvirt"
)

// cutPort is where a libvirtd is reached through what cuts it off.
const cutPort = "16510"

// cutEnv has this program be that, in the namespaces of a host.
const cutEnv = "GPUCTL_TEST_CUT"

func TestMain(m *testing.M) {
	if listen := os.Getenv(cutEnv); listen != "" {
		fmt.Fprintln(os.Stderr, cut(listen))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// cut passes connections on to the libvirtd of a host, and ends the first one in
// the moment in which libvirtd answers that a VM which came over it runs
// (virDomainMigrateFinish3Params): that answer is lost.
func cut(address string) error {
	l, err := net.Listen("tcp", net.JoinHostPort(address, cutPort))
	if err != nil {
		return err
	}
	var once atomic.Bool
	for {
		in, err := l.Accept()
		if err != nil {
			return err
		}
		out, err := net.Dial("tcp", net.JoinHostPort(address, "16509"))
		if err != nil {
			return err
		}
		over := func() { in.Close(); out.Close() }
		go func() { defer over(); _, _ = io.Copy(out, in) }()
		go func() {
			defer over()
			for {
				frame, err := readFrame(out)
				if err != nil {
					return
				}
				const finish, reply = 306, 1
				if binary.BigEndian.Uint32(frame[12:]) == finish && binary.BigEndian.Uint32(frame[16:]) == reply && once.CompareAndSwap(false, true) {
					return
				}
				if _, err := in.Write(frame); err != nil {
					return
				}
			}
		}()
	}
}

// readFrame reads a message of libvirt's: its length, program, version,
// procedure, type, serial and status, then its body.
func readFrame(r io.Reader) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n < 28 || n > 64<<20 {
		return nil, errors.New("no message")
	}
	frame := make([]byte, n)
	copy(frame, head[:])
	_, err := io.ReadFull(r, frame[4:])
	return frame, err
}

// cutCluster is two hosts, of which the second one's last answer about the first VM that comes
// to it is lost. said is what cuts it off has to say.
func cutCluster(t *testing.T, locks libvirt.Locks) (r *libvirt.Rig, a, b *host, said *testkit.Log) {
	t.Helper()
	r, a, b = clusterBy(t, locks, "qemu+tcp://{address}:"+cutPort+"/system")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(self)
	if err == nil {
		self = filepath.Join(r.Dir, "cut.test")
		err = os.WriteFile(self, data, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	proxy := b.Command(t.Context(), self)
	proxy.Env = append(os.Environ(), cutEnv+"="+b.Address)
	said = &testkit.Log{}
	proxy.Stdout, proxy.Stderr, proxy.WaitDelay = said, said, time.Second
	if err := proxy.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = proxy.Process.Kill(); _ = proxy.Wait() })
	return r, a, b, said
}

// The answer that the VM runs at its destination is lost, and libvirt lets it go
// on at its source, too: nothing is done any more, one of them is paused, and
// everybody is told.
func TestLostLastAnswerOfLibvirtIsAnAlarm(t *testing.T) {
	r, a, b, said := cutCluster(t, libvirt.NoLocks)
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
	defer cancel()
	xml, err := r.Guest("web", uuid, "")
	if err != nil {
		t.Fatal(err)
	}
	// qemu itself keeps a disk from being used twice, where it is not said to be
	// shared; libxl does not.
	xml = []byte(strings.Replace(string(xml), "<target dev='sda'", "<shareable/><target dev='sda'", 1))
	d, err := a.virt.Define(ctx, xml)
	if err == nil {
		d, err = a.virt.Start(ctx, d)
	}
	if err != nil {
		t.Fatal(err)
	}
	plan, err := a.migrations().Plan(ctx, connect.NewRequest(&gpuctlv1.MachinePlanRequest{Machine: "web", Verb: "migrate"}))
	if err != nil || len(plan.Msg.GetNotes()) != 1 || plan.Msg.GetNotes()[0].GetCode() != "no_lock_manager" {
		t.Errorf("the plan does not say that there is no lock manager: %v %v", plan, err)
	}
	last, err := a.migrate(ctx, &gpuctlv1.MachinePlanRequest{Machine: "web"}, nil)
	if err != nil || last.GetEnd() != "held" || !strings.Contains(last.GetMessage(), "the VM runs on two hosts, hosta and hostb: the copy on host hostb is paused") {
		t.Fatalf("%v %v; %s", last, err, said)
	}
	if s, o := a.state(ctx), b.state(ctx); s != virt.Running || o != virt.Paused {
		t.Errorf("it is %v at home, the copy is %v", s, o)
	}
	b.alarmed(ctx, "the VM runs on two hosts")
	// The operator ends the copy, and has it go on.
	copied, err := b.virt.Lookup(ctx, "web")
	if err == nil {
		err = b.virt.Destroy(ctx, copied)
	}
	if err != nil {
		t.Fatal(err)
	}
	if kept, err := b.virt.Lookup(ctx, "web"); err == nil {
		if err := b.virt.Undefine(ctx, kept); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := a.migrations().Resume(ctx, connect.NewRequest(&gpuctlv1.MachineResumeRequest{Id: last.GetId()})); err != nil {
		t.Fatal(err)
	}
	testkit.Until(t, "it is on hostb alone", func() error {
		on, err := where(ctx, "web", a, b)
		return testkit.Want(err == nil && strings.Join(on, " ") == "hostb", on, err)
	})
	res, err := b.api().Status(ctx, connect.NewRequest(&clusterv1.StatusRequest{}))
	if err != nil || len(res.Msg.GetAlarms()) != 0 {
		t.Errorf("%v %v", res, err)
	}
	_ = a.virt.Destroy(context.Background(), d)
	if d, err := b.virt.Lookup(context.Background(), "web"); err == nil {
		_ = b.virt.Destroy(context.Background(), d)
	}
}
