package grafana_test

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/hostd/telemetry/metrics"
)

type source struct {
	Type string `json:"type"`
	UID  string `json:"uid"`
}

type dashboard struct {
	Title         string  `json:"title"`
	UID           string  `json:"uid"`
	SchemaVersion int     `json:"schemaVersion"`
	ID            *int    `json:"id"`
	Panels        []panel `json:"panels"`
	Templating    struct {
		List []struct {
			Name       string          `json:"name"`
			Type       string          `json:"type"`
			Query      json.RawMessage `json:"query"`
			Definition string          `json:"definition"`
		} `json:"list"`
	} `json:"templating"`
	Annotations struct {
		List []struct {
			Expr string `json:"expr"`
		} `json:"list"`
	} `json:"annotations"`
}

type panel struct {
	ID         int    `json:"id"`
	Type       string `json:"type"`
	Title      string `json:"title"`
	Datasource source `json:"datasource"`
	GridPos    struct {
		X, Y, W, H int
	} `json:"gridPos"`
	Targets []struct {
		RefID        string `json:"refId"`
		Datasource   source `json:"datasource"`
		Expr         string `json:"expr"`
		LegendFormat string `json:"legendFormat"`
	} `json:"targets"`
}

func load(t *testing.T) dashboard {
	t.Helper()
	data, err := os.ReadFile("gpuctl.json")
	if err != nil {
		t.Fatal(err)
	}
	var d dashboard
	if err := json.Unmarshal(data, &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// exported are the series that hostd exports, with their labels.
func exported(t *testing.T) map[string][]string {
	t.Helper()
	m := metrics.New(metrics.NewCounters(), metrics.Sources{})
	all := map[string][]string{}
	for _, d := range m.Definitions() {
		if d.Type != "histogram" {
			all[d.Name] = d.Labels
			continue
		}
		all[d.Name+"_sum"], all[d.Name+"_count"] = d.Labels, d.Labels
		all[d.Name+"_bucket"] = append([]string{"le"}, d.Labels...)
	}
	families, err := m.Registry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if _, ok := all[f.GetName()]; !ok {
			all[f.GetName()] = nil
		}
	}
	return all
}

// check returns what an expression names that there is not.
func check(expr, legend string, all map[string][]string) (names, problems []string) {
	quoted := regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)
	bare := quoted.ReplaceAllString(expr, `""`)
	known := []string{"job", "instance"}
	for _, name := range regexp.MustCompile(`\b[a-z]+_[a-z0-9_]+\b(?:\s*\()?`).FindAllString(bare, -1) {
		name = strings.TrimSpace(name)
		if strings.HasSuffix(name, "(") || slices.Contains([]string{"group_left", "group_right", "__rate_interval"}, name) {
			continue // a function
		}
		labels, ok := all[name]
		if !ok {
			problems = append(problems, "nobody exports "+name)
			continue
		}
		names = append(names, name)
		known = append(known, labels...)
	}
	for _, m := range regexp.MustCompile(`([a-z0-9_]+)\{([^}]*)\}`).FindAllStringSubmatch(bare, -1) {
		for _, matcher := range strings.Split(m[2], ",") {
			label := regexp.MustCompile(`^\s*[a-z_]+`).FindString(matcher)
			if !slices.Contains(append([]string{"job", "instance"}, all[m[1]]...), strings.TrimSpace(label)) {
				problems = append(problems, fmt.Sprintf("%s has no label %q", m[1], label))
			}
		}
	}
	var used []string
	for _, m := range regexp.MustCompile(`\bby \(([^)]*)\)`).FindAllStringSubmatch(bare, -1) {
		for _, label := range strings.Split(m[1], ",") {
			used = append(used, strings.TrimSpace(label))
		}
	}
	for _, m := range regexp.MustCompile(`\{\{(\w+)\}\}`).FindAllStringSubmatch(legend, -1) {
		used = append(used, m[1])
	}
	for _, label := range used {
		if !slices.Contains(known, label) {
			problems = append(problems, fmt.Sprintf("label %q is of no metric here", label))
		}
	}
	for _, pair := range []string{"()", "{}"} {
		if strings.Count(bare, pair[:1]) != strings.Count(bare, pair[1:]) {
			problems = append(problems, "unbalanced "+pair)
		}
	}
	return names, problems
}

func TestCheckFindsMistakes(t *testing.T) {
	all := map[string][]string{"gpuctl_gpus": {"model"}, "gpuctl_x_seconds_bucket": {"le", "verb"}}
	for expr, ok := range map[string]bool{
		`sum by (model) (gpuctl_gpus{job=~"$job",model="a_b"})`:                                           true,
		`histogram_quantile(0.5, sum by (le) (rate(gpuctl_x_seconds_bucket{job="x"}[$__rate_interval])))`: true,
		`sum(gpuctl_gpu)`:                           false,
		`gpuctl_gpus{state="x"}`:                    false,
		`sum by (verb) (gpuctl_gpus)`:               false,
		`sum(gpuctl_gpus`:                           false,
		`rate(gpuctl_x_seconds[$__rate_interval])`:  false,
		`sum by (model) (go_made_up{model="free"})`: false,
	} {
		if _, problems := check(expr, "", all); (len(problems) == 0) != ok {
			t.Errorf("%s: %v", expr, problems)
		}
	}
	if _, problems := check(`sum by (model) (gpuctl_gpus)`, "{{verb}}", all); len(problems) == 0 {
		t.Error("a legend of another metric passes")
	}
}

func TestPanelsShowWhatThereIs(t *testing.T) {
	d, all := load(t), exported(t)
	shown := map[string]bool{}
	for _, p := range d.Panels {
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("%s shows nothing", p.Title)
		}
		for _, target := range p.Targets {
			names, problems := check(target.Expr, target.LegendFormat, all)
			for _, problem := range problems {
				t.Errorf("%s: %s in %s", p.Title, problem, target.Expr)
			}
			if len(names) == 0 {
				t.Errorf("%s: no metric in %s", p.Title, target.Expr)
			}
			for _, name := range names {
				shown[name] = true
			}
		}
	}
	for _, a := range d.Annotations.List {
		if _, problems := check(a.Expr, "", all); len(problems) > 0 {
			t.Errorf("annotation: %v", problems)
		}
	}
	for _, v := range d.Templating.List {
		if m := regexp.MustCompile(`^label_values\((.*), (\w+)\)$`).FindStringSubmatch(v.Definition); m != nil {
			if _, problems := check(m[1], "{{"+m[2]+"}}", all); len(problems) > 0 && m[2] != "job" && m[2] != "instance" {
				t.Errorf("variable %s: %v", v.Name, problems)
			}
		} else if v.Type == "query" {
			t.Errorf("variable %s: query %q", v.Name, v.Definition)
		}
	}
	for _, name := range []string{
		"gpuctl_cluster_is_leader", "gpuctl_cluster_quorum", "gpuctl_cluster_members", "gpuctl_cluster_term", "gpuctl_gpus",
		"gpuctl_gpu_memory_bytes", "gpuctl_claims", "gpuctl_claim_bound_seconds_bucket", "gpuctl_operations_total",
		"gpuctl_operation_stopped_seconds_bucket", "gpuctl_host_gpu_utilization_ratio", "gpuctl_host_gpu_temperature_celsius",
		"gpuctl_refused_calls_total",
	} {
		if !shown[name] {
			t.Errorf("no panel shows %s", name)
		}
	}
}

// What Grafana needs to import the file as it is.
func TestDashboardCanBeImported(t *testing.T) {
	d := load(t)
	if d.Title == "" || d.UID == "" || d.ID != nil || d.SchemaVersion < 39 {
		t.Errorf("title %q, uid %q, id %v, schema %d", d.Title, d.UID, d.ID, d.SchemaVersion)
	}
	variables := map[string]string{}
	for _, v := range d.Templating.List {
		variables[v.Name] = v.Type
	}
	if variables["datasource"] != "datasource" {
		t.Error("no variable for the data source")
	}
	want := source{"prometheus", "${datasource}"}
	ids, taken := map[int]bool{}, map[[2]int]string{}
	for _, p := range d.Panels {
		if ids[p.ID] || p.ID <= 0 || p.Title == "" {
			t.Errorf("panel %d (%s): its id is taken, or it has no title", p.ID, p.Title)
		}
		ids[p.ID] = true
		if !slices.Contains([]string{"row", "stat", "timeseries"}, p.Type) {
			t.Errorf("%s: type %s", p.Title, p.Type)
		}
		if p.GridPos.W < 1 || p.GridPos.H < 1 || p.GridPos.X < 0 || p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("%s: at %+v", p.Title, p.GridPos)
		}
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				at := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				if taken[at] != "" {
					t.Fatalf("%s covers %s", p.Title, taken[at])
				}
				taken[at] = p.Title
			}
		}
		refs := map[string]bool{}
		for _, target := range p.Targets {
			if refs[target.RefID] || target.Datasource != want || p.Datasource != want {
				t.Errorf("%s: target %s of %v", p.Title, target.RefID, target.Datasource)
			}
			refs[target.RefID] = true
			for _, m := range regexp.MustCompile(`\$(\w+)`).FindAllStringSubmatch(target.Expr, -1) {
				if m[1] != "__rate_interval" && variables[m[1]] == "" {
					t.Errorf("%s: no variable %s", p.Title, m[1])
				}
			}
		}
	}
}
