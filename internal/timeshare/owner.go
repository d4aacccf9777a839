package timeshare

import "time"

// OwnerID names an owner: whoever is to get a share of the GPU, a VM or a tenant.
// Give several sessions of one tenant one owner, or each of them gets a share.
type OwnerID string

// Kind tells commands of different lengths apart: for instance a hash of a
// kernel's name and size. Only lengths of the same owner's commands are
// predicted from it, so a Kind may come from the owner. 0 is a kind like others.
type Kind uint64

// Usage is what an owner has had.
type Usage struct {
	Weight   int
	Pending  int           // commands that have not started
	Commands uint64        // commands that have ended
	Busy     time.Duration // how long these ran
	Waited   time.Duration // how long the GPU was kept idle for the owner
}

// owner is an owner's account. What the policies keep is in it too, as each
// scheduler has one policy.
type owner struct {
	id      OwnerID
	weight  int
	leaving bool // gone, but its last command runs

	queue  []batch // oldest first
	first  int     // of queue
	usage  Usage
	length lengths

	ended bool          // a command of it has ended
	since time.Duration // with nothing pending or running: when its last command ended
	think average       // from the end of the last command to the next submission

	// Credit and Band.
	budget time.Duration // what is left to it
	used   time.Duration // in this period

	// Fair.
	virtual time.Duration // time charged divided by weight
	rest    time.Duration // what the division left over, less than weight
	debt    time.Duration // likewise of the percentage of waits, less than 100
}

// batch is a number of like commands that were submitted together.
type batch struct {
	kind  Kind
	count int
	seq   uint64 // order of submission over all owners
}

func (o *owner) pending() bool { return o.usage.Pending > 0 }

// head is the batch of the oldest command.
func (o *owner) head() *batch { return &o.queue[o.first] }

func (o *owner) push(b batch) {
	if o.first == len(o.queue) {
		o.queue, o.first = o.queue[:0], 0
	}
	if o.first > len(o.queue)/2 && len(o.queue) == cap(o.queue) {
		o.queue, o.first = append(o.queue[:0], o.queue[o.first:]...), 0
	}
	o.queue = append(o.queue, b)
	o.usage.Pending += b.count
}

func (o *owner) pop() Kind {
	b := o.head()
	if b.count--; b.count == 0 {
		o.first++
	}
	o.usage.Pending--
	return b.kind
}

// drop removes the pending command with that index, which the caller has checked.
func (o *owner) drop(index int) {
	i := o.first
	for index >= o.queue[i].count {
		index -= o.queue[i].count
		i++
	}
	if o.queue[i].count--; o.queue[i].count == 0 {
		o.queue = append(o.queue[:i], o.queue[i+1:]...)
	}
	o.usage.Pending--
}

// average is an exponentially weighted moving average; the zero value knows nothing.
type average struct {
	value time.Duration
	known bool
}

// add lets a sample count for one part in 1<<shift.
func (a *average) add(sample time.Duration, shift uint) {
	if !a.known {
		a.value, a.known = sample, true
		return
	}
	a.value += (sample - a.value) >> shift
}

const (
	lengthShift = 2  // of the averages of lengths
	kinds       = 64 // that an owner's lengths are told apart for
)

// lengths predicts how long commands run: by the average of their kind, or of all
// of their owner. Kinds come from owners, so that there is a fixed number of
// places; a kind in another one's place makes that forgotten.
type lengths struct {
	all    average
	places [kinds]struct {
		kind Kind
		average
	}
}

func place(k Kind) int { return int(uint64(k) * 0x9E3779B97F4A7C15 >> 58) } // Fibonacci hashing to 6 bits

func (l *lengths) learn(k Kind, ran time.Duration) {
	l.all.add(ran, lengthShift)
	p := &l.places[place(k)]
	if p.kind != k {
		p.kind, p.average = k, average{}
	}
	p.add(ran, lengthShift)
}

// predict reports false if no command of the owner has ended yet.
func (l *lengths) predict(k Kind) (time.Duration, bool) {
	if p := &l.places[place(k)]; p.known && p.kind == k {
		return p.value, true
	}
	return l.all.value, l.all.known
}
