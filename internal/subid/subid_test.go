package subid

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

func names(name string) (uint32, bool) {
	id, ok := map[string]uint32{"root": 0, "ada": 1000, "bob": 1001}[name]
	return id, ok
}

func TestWhoseAUserIs(t *testing.T) {
	ranges, err := parse(strings.NewReader(`# comment:1:2
ada:100000:65536
bob:165536:65536
1002:300000:10

root:1000000:1000000000
nobody-here:231072:65536
ada:not a number:5
ada:0:5
bob:400000:0
short:1
bob:4294967290:4294967295
`), names)
	if err != nil {
		t.Fatal(err)
	}
	o := &Owners{looked: time.Now().Add(time.Hour), ranges: ranges}
	for uid, want := range map[uint32]uint32{
		0: 0, 1000: 1000, 99999: 99999,
		100000: 1000, 165535: 1000, 165536: 1001, 231071: 1001, // bob begins where ada ends
		231072: 231072, // of a user that there is not
		300000: 1002, 300009: 1002, 300010: 300010,
		400000: 400000, 1000000: 1000000, // root's
		4294967290: 1001, 4294967295: 1001,
	} {
		if got := o.Of(uid); got != want {
			t.Errorf("user %d is %d's, want %d", uid, got, want)
		}
	}
	var none *Owners
	if none.Of(100000) != 100000 {
		t.Error("who knows no file knows an owner")
	}
}

func TestFileIsReadAgainWhenItHasChanged(t *testing.T) {
	file := filepath.Join(t.TempDir(), "subuid")
	o := &Owners{path: file, id: names}
	look := func(text string) uint32 {
		t.Helper()
		if text != "" {
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		o.look()
		return o.Of(100001)
	}
	if got := look(""); got != 100001 {
		t.Fatal(got)
	}
	if got := look("ada:100000:10\n"); got != 1000 {
		t.Fatal(got)
	}
	if got := look("bob:100000:1000\n"); got != 1001 {
		t.Fatal(got)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if got := look(""); got != 100001 {
		t.Fatal(got)
	}
}

// A directory service that does not answer keeps nobody waiting.
func TestNamesThatDoNotComeKeepNobodyWaiting(t *testing.T) {
	file := filepath.Join(t.TempDir(), "subuid")
	if err := os.WriteFile(file, []byte("ada:100000:10\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	asked, answer := make(chan struct{}), make(chan struct{})
	o := &Owners{path: file, id: func(name string) (uint32, bool) {
		close(asked)
		<-answer
		return names(name)
	}}
	if got := o.Of(100001); got != 100001 { // it begins to look
		t.Fatal(got)
	}
	<-asked
	if got := o.Of(100001); got != 100001 {
		t.Fatal(got)
	}
	close(answer)
	testkit.Until(t, "the answer counts", func() error {
		return testkit.Want(o.Of(100001) == 1000)
	})
}

func FuzzParse(f *testing.F) {
	f.Add("ada:100000:65536\nbob:165536:65536\n", uint32(100000))
	f.Add("1002:300000:10\n#x\n::\n", uint32(300001))
	f.Fuzz(func(t *testing.T, text string, uid uint32) {
		ranges, _ := parse(strings.NewReader(text), names)
		for _, s := range ranges {
			if s.owner == 0 || s.count == 0 || s.first == 0 {
				t.Fatalf("%+v of %q", s, text)
			}
		}
		o := &Owners{looked: time.Now().Add(time.Hour), ranges: ranges}
		if uid != 0 && o.Of(uid) == 0 {
			t.Fatalf("user %d is root's by %q", uid, text)
		}
	})
}
