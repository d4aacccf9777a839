package access

import (
	"bytes"
	"encoding/pem"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/cluster/pki"
)

// A program that knows nothing of gpuctl uses the API with the files of a
// user, verifying the host by its name.
func TestCurl(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Fatal("no curl: make setup")
	}
	s := open(t, true)
	s.put("ann", admin)
	clusters := must(pki.NewClusters(func(string) string { return t.TempDir() }))
	if err := clusters.Save(&pki.Credentials{Name: "c", Addresses: []string{s.address}, Material: issue(s.ca, pki.Identity{ID: "ann", Role: admin}, time.Now())}); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(clusters.Path(), "c")
	_, port, _ := strings.Cut(s.address, ":")
	call := func(args ...string) string {
		t.Helper()
		args = append([]string{
			"-sS", "--max-time", "10", "--noproxy", "*", "--resolve", "n1:" + port + ":127.0.0.1", "--cacert", filepath.Join(dir, "ca.crt"),
			"-H", "Content-Type: application/json", "-d", "{}",
		}, args...)
		out, err := exec.CommandContext(t.Context(), curl, append(args, "https://n1:"+port+clusterv1connect.ClusterServiceStatusProcedure)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if got := call("--cert", filepath.Join(dir, "user.crt"), "--key", filepath.Join(dir, "user.key")); got != `{"joined":true}` {
		t.Errorf("got %s", got)
	}
	if got := call(); !strings.Contains(got, `"code":"unauthenticated"`) || !strings.Contains(got, "ask an administrator for a token") {
		t.Errorf("without a certificate: %s", got)
	}
	block, rest := pem.Decode(must(os.ReadFile(filepath.Join(dir, "user.key"))))
	if block == nil || block.Type != "PRIVATE KEY" || len(bytes.TrimSpace(rest)) != 0 {
		t.Error("the key is not PKCS #8")
	}
}
