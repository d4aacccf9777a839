package placementtest

import (
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// Files of the openb trace (alibaba/clusterdata, cluster-trace-gpu-v2023).
const (
	OpenbNodes   = "openb_node_list_gpu_node.csv"
	OpenbPods    = "openb_pod_list_default.csv"
	OpenbPodSpec = "openb_pod_list_gpuspec33.csv" // a third of the tasks name models
)

// Node is a host of a trace.
type Node struct {
	Name  string
	GPUs  int
	Model string
}

// Task is a task of a trace: what one claim asks for, and when.
type Task struct {
	Name    string
	GPUs    int
	Milli   int      // thousandths of one GPU, if it needs only a part
	Models  []string // models that it may use; empty: any
	Arrives int64    // seconds
	Leaves  int64
}

// Trace is a cluster and its tasks.
type Trace struct {
	Nodes []Node
	Tasks []Task // sorted by arrival
}

// milli is the memory in bytes that stands for a thousandth of a GPU. The trace does not
// contain memory, so all its GPUs have 1000 milli.
const milli = 1 << 20

// LoadOpenb reads a trace from a folder: its nodes, and those tasks in the file pods that
// need GPUs.
func LoadOpenb(folder, pods string) (*Trace, error) {
	t := &Trace{}
	err := readTable(filepath.Join(folder, OpenbNodes), []string{"sn", "gpu", "model"}, func(row []string) error {
		gpus, err := strconv.Atoi(row[1])
		if err != nil || gpus < 1 || gpus > 64 {
			return fmt.Errorf("%q is not a number of GPUs", row[1])
		}
		t.Nodes = append(t.Nodes, Node{row[0], gpus, row[2]})
		return nil
	})
	if err != nil {
		return nil, err
	}
	columns := []string{"name", "num_gpu", "gpu_milli", "gpu_spec", "creation_time", "deletion_time"}
	err = readTable(filepath.Join(folder, pods), columns, func(row []string) error {
		var n [4]int64
		for i, column := range []int{1, 2, 4, 5} {
			var err error
			if n[i], err = strconv.ParseInt(row[column], 10, 64); err != nil || n[i] < 0 {
				return fmt.Errorf("%q is not a number", row[column])
			}
		}
		if n[0] == 0 {
			return nil
		}
		if n[0] > 64 || n[1] > 1000 {
			return fmt.Errorf("%d GPUs of %d thousandths", n[0], n[1])
		}
		task := Task{Name: row[0], GPUs: int(n[0]), Milli: int(n[1]), Arrives: n[2], Leaves: n[3]}
		if row[3] != "" {
			task.Models = strings.Split(row[3], "|")
		}
		t.Tasks = append(t.Tasks, task)
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(t.Tasks, func(a, b Task) int { return cmp.Compare(a.Arrives, b.Arrives) })
	return t, nil
}

// readTable calls row with the values of the given columns, for each row of a CSV file.
func readTable(path string, columns []string, row func([]string) error) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	defer f.Close()
	r := csv.NewReader(f)
	r.ReuseRecord = true
	header, err := r.Read()
	if err != nil {
		return fmt.Errorf("trace %s: %w", path, err)
	}
	var at []int
	for _, c := range columns {
		i := slices.Index(header, c)
		if i < 0 {
			return fmt.Errorf("trace %s: no column %s", path, c)
		}
		at = append(at, i)
	}
	values := make([]string, len(columns))
	for {
		record, err := r.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("trace %s: %w", path, err)
		}
		for i, column := range at {
			values[i] = record[column]
		}
		if err := row(values); err != nil {
			line, _ := r.FieldPos(0)
			return fmt.Errorf("trace %s: line %d: %w", path, line, err)
		}
	}
}

// Cluster makes the trace's cluster. Models are ranked by their age. The trace hides the
// names of some.
func (t *Trace) Cluster() (*Cluster, error) {
	order := []string{"T4", "P100", "V100M16", "V100M32", "A10", "G1", "G2", "G3"}
	c := NewCluster()
	limits := &gpuctlv1.Limits{GlobalMemory: 1000 * milli}
	for _, n := range t.Nodes {
		var gpus []*clusterv1.GPU
		for i := range n.GPUs {
			gpus = append(gpus, &clusterv1.GPU{
				Name: fmt.Sprintf("gpu%d", i), Model: n.Model, Type: "gpu", Limits: limits, Runtime: "nvidia", RuntimeKey: "nvidia",
				Rank: uint32(10 * (1 + slices.Index(order, n.Model))), Health: clusterv1.Health_HEALTH_OK, NumaNode: -1, Present: true,
			})
		}
		if err := c.Report(&clusterv1.Host{Name: n.Name, Id: "id-" + n.Name, Protocol: 1}, gpus); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Claim returns the claim for a task.
func (t Task) Claim(id string, policy clusterv1.Policy) *clusterv1.Claim {
	c := &clusterv1.Claim{Id: id, Count: uint32(t.GPUs), Policy: policy}
	if t.GPUs == 1 && t.Milli < 1000 {
		c.MinMemory = uint64(max(1, t.Milli)) * milli
	}
	if len(t.Models) > 0 {
		var quoted []string
		for _, m := range t.Models {
			quoted = append(quoted, strconv.Quote(m))
		}
		c.Expr = "model in [" + strings.Join(quoted, ", ") + "]"
	}
	return c
}

// demand returns what a task asks for, in thousandths of a GPU.
func (t Task) demand() int {
	if t.GPUs == 1 && t.Milli < 1000 {
		return max(1, t.Milli)
	}
	return 1000 * t.GPUs
}
