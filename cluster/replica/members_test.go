package replica

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// host as the table writes it: name, then V voter, L leader (and voter), d
// dead, x lost, s stable, and /zone.
func parse(s string) []member {
	var out []member
	for _, f := range strings.Fields(s) {
		f, zone, _ := strings.Cut(f, "/")
		m := member{ID: f[:1], Name: f[:1], Zone: zone}
		f = f[1:]
		m.Stable = strings.Contains(f, "s")
		m.Leader = strings.Contains(f, "L")
		m.Voter = m.Leader || strings.Contains(f, "V")
		m.Lost = strings.Contains(f, "x")
		m.Alive = !m.Lost && !strings.Contains(f, "d")
		out = append(out, m)
	}
	return out
}

func TestPlan(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		hosts string
		limit int
		want  string // + promote, - demote
	}{
		"one host":                               {"aL", 7, ""},
		"two hosts keep one voter":               {"aL bs", 7, ""},
		"three hosts, one ready":                 {"aL bs c", 7, ""},
		"three hosts":                            {"aL bs cs", 7, "+b"},
		"on the way to three":                    {"aL bV cs", 7, "+c"},
		"on the way to three, nobody ready":      {"aL bV c", 7, ""},
		"four hosts":                             {"aL bVs cVs ds", 7, ""},
		"five hosts need two ready":              {"aL bVs cVs ds e", 7, ""},
		"five hosts":                             {"aL bVs cVs ds es", 7, "+d"},
		"seven hosts, five at most":              {"aL bVs cVs dVs eVs fs gs", 5, ""},
		"seven hosts":                            {"aL bVs cVs dVs eVs fs gs", 7, "+f"},
		"too many voters":                        {"aL bVs cVs dVs eVs", 3, "-e"},
		"too many voters, a dead one first":      {"aL bVd cVs dVs eVs", 3, "-b"},
		"a host was removed":                     {"aL bVs", 7, "-b"},
		"the leader is never demoted":            {"aVs bL", 7, "-a"},
		"a lost voter without a successor":       {"aL bVs cVx d", 7, ""},
		"a lost voter":                           {"aL bVs cVx ds", 7, "+d"},
		"a lost voter and its successor":         {"aL bVs cVx dV", 7, "-c"},
		"a dead voter is not yet lost":           {"aL bVs cVd ds", 7, ""},
		"without a majority nothing is done":     {"aL bVx cVx ds", 7, ""},
		"no demotion that could not commit":      {"aL bVx cVx dVd es", 3, ""},
		"zones: the emptiest first":              {"aL/1 bs/1 cs/2", 7, "+c"},
		"zones: names among equals":              {"aL/1 cs/2 bs/3", 7, "+b"},
		"zones: two voters in one, none in one":  {"aL/1 bVs/1 cVs/2 ds/3", 7, "+d"},
		"zones: the crowded one goes":            {"aL/1 bV/1 cV/2 dV/3", 7, "-b"},
		"zones: even already":                    {"aL/1 bVs/2 cVs/3 ds/3", 7, ""},
		"zones: no better than it is":            {"aL/1 bVs/1 cVs/2 ds/2", 7, ""},
		"a lost voter does not fill its zone":    {"aL/1 bVs/2 cVx/3 ds/1 es/3", 7, "+e"},
		"lost hosts do not lower the number":     {"aL bVs cVx dx ex", 7, ""},
		"lost hosts do not demote those who are": {"aL bVs cVs dx", 7, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := ""
			if mv := plan(parse(tt.hosts), tt.limit); mv != nil {
				got = map[bool]string{true: "+", false: "-"}[mv.Promote] + mv.ID
			}
			if got != tt.want {
				t.Errorf("%s: got %q, want %q", tt.hosts, got, tt.want)
			}
		})
	}
}

// Whatever the hosts are: the plan comes to an end, ends with an odd number of
// voters when there is a healthy host for each, and never asks for what the
// voters who are alive could not commit.
func TestPlanComesToAnEnd(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.SampledFrom([]int{3, 5, 7}).Draw(t, "limit")
		n := rapid.IntRange(1, 12).Draw(t, "hosts")
		ms := make([]member, n)
		for i := range ms {
			m := member{ID: fmt.Sprint(i), Name: fmt.Sprint(i), Zone: rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "zone")}
			switch rapid.IntRange(0, 4).Draw(t, "health") {
			case 0:
				m.Lost = true
			case 1:
			case 2:
				m.Alive = true
			default:
				m.Alive, m.Stable = true, true
			}
			m.Voter = rapid.Bool().Draw(t, "voter")
			ms[i] = m
		}
		ms[0] = member{ID: "0", Name: "0", Voter: true, Leader: true, Alive: true, Stable: true}
		count := func(f func(member) bool) (n int) {
			for _, m := range ms {
				if f(m) {
					n++
				}
			}
			return n
		}
		voters := func(m member) bool { return m.Voter }
		living := func(m member) bool { return m.Voter && m.Alive }
		for step := 0; ; step++ {
			mv := plan(ms, limit)
			if mv == nil {
				break
			}
			if step > 40 {
				t.Fatalf("it goes on and on: %+v: %+v", mv, ms)
			}
			i := slices.IndexFunc(ms, func(m member) bool { return m.ID == mv.ID })
			if ms[i].Voter == mv.Promote || ms[i].Leader {
				t.Fatalf("%+v for %+v", mv, ms[i])
			}
			if mv.Promote && !ms[i].Stable {
				t.Fatalf("an unstable host is promoted: %+v", ms[i])
			}
			ms[i].Voter = mv.Promote
			if alive, all := count(living), count(voters); alive <= all/2 {
				t.Fatalf("after %+v, %d of %d voters are alive", mv, alive, all)
			}
		}
		if count(func(m member) bool { return !m.Stable }) == 0 && count(voters) != target(n, limit) {
			t.Fatalf("%d voters for %d healthy hosts", count(voters), n)
		}
	})
}
