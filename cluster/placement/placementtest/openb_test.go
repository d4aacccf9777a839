package placementtest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func write(t *testing.T, nodes, pods string) string {
	dir := t.TempDir()
	for name, text := range map[string]string{OpenbNodes: nodes, OpenbPods: pods} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

const (
	someNodes = "sn,cpu_milli,memory_mib,gpu,model\nn0,1,1,2,T4\nn1,1,1,1,G2\n"
	podHeader = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)

func TestReplay(t *testing.T) {
	trace, err := LoadOpenb(write(t, someNodes, podHeader+
		"late,1,1,1,500,,LS,Running,20,30,20\n"+
		"big,1,1,2,1000,T4|G3,LS,Running,0,20,0\n"+
		"none,1,1,0,0,,LS,Running,0,20,0\n"+
		"half,1,1,1,500,G2,LS,Running,1,9,1\n"+
		"huge,1,1,3,1000,,LS,Running,2,9,2\n"), OpenbPods)
	if err != nil {
		t.Fatal(err)
	}
	if len(trace.Nodes) != 2 || len(trace.Tasks) != 4 || trace.Tasks[0].Name != "big" || len(trace.Tasks[0].Models) != 2 {
		t.Fatalf("%+v", trace)
	}
	for _, fresh := range []func() Chooser{
		func() Chooser { return NewPlacer(0) }, FirstFit, func() Chooser { return Random(1) },
	} {
		r, err := trace.Replay(fresh())
		if err != nil || r.Placed != 3 || r.Refused != 0 || r.Asked != 6000 || r.Given != 3000 || r.Capacity != 3000 || r.Allocated < 0.83 || r.Allocated > 0.84 {
			t.Errorf("%+v, %v", r, err)
		}
		if r, err = trace.Fill(fresh(), 2, 1); err != nil || r.Refused != 0 || r.Allocated < 0.5 {
			t.Errorf("%+v, %v", r, err)
		}
	}
}

func TestBadTraces(t *testing.T) {
	for part, files := range map[string][2]string{
		"no column gpu":          {"sn,model\nx,T4\n", podHeader},
		"line 2: \"-3\" is not":  {"sn,gpu,model\nx,-3,T4\n", podHeader},
		"line 2: \"x\" is not":   {someNodes, podHeader + "p,1,1,x,500,,LS,Running,0,1,0\n"},
		"line 2: 1 GPUs of 2000": {someNodes, podHeader + "p,1,1,1,2000,,LS,Running,0,1,0\n"},
		"wrong number of fields": {someNodes, podHeader + "p\n"},
		OpenbNodes + ": EOF":     {"", podHeader},
	} {
		if _, err := LoadOpenb(write(t, files[0], files[1]), OpenbPods); err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%v; want %q in it", err, part)
		}
	}
	if _, err := LoadOpenb(t.TempDir(), OpenbPods); err == nil {
		t.Error("a folder without a trace was read")
	}
}
