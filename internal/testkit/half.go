package testkit

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// halfEnded tells a test's program to be what Half starts.
const halfEnded = "GPUCTL_TEST_HALF_ENDED"

// HalfMain is called first in TestMain by packages whose tests call Half or Unreadable.
func HalfMain() {
	unreadableMain()
	if os.Getenv(halfEnded) == "" {
		return
	}
	if runtime.LockOSThread(); unix.Gettid() == unix.Getpid() {
		_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0) // of this thread alone: the runtime has others
	}
	os.Exit(1)
}

// Half starts a process of which the first thread has ended, and the others go on. files are
// open in it.
func Half(t *testing.T, as *syscall.Credential, files ...*os.File) (pid int) {
	t.Helper()
	Until(t, "a process of which the first thread has ended", func() error {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), halfEnded+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: as}
		cmd.ExtraFiles = files
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		for {
			select {
			case err := <-ended: // it was not on its first thread
				return errors.Join(err, errors.New("it has ended"))
			default:
			}
			b, err := os.ReadFile("/proc/" + strconv.Itoa(cmd.Process.Pid) + "/stat")
			if err == nil && strings.Contains(string(b), ") Z ") {
				pid = cmd.Process.Pid
				t.Cleanup(func() {
					_ = syscall.Kill(pid, syscall.SIGKILL)
					<-ended
				})
				return nil
			}
			runtime.Gosched()
		}
	})
	return pid
}
