package virt

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/digitalocean/go-libvirt"
)

// JobState is the state of a domain's job (virDomainJobType).
type JobState int32

// States of a job.
const (
	NoJob JobState = iota
	JobBounded
	JobUnbounded
	JobIsCompleted
	JobFailed
	JobCancelled
)

// Job is what libvirt reports about a domain's job. The libxl driver reports only the
// elapsed time. Unknown values are zero.
type Job struct {
	State              JobState
	Elapsed, Remaining time.Duration
	// Downtime is how long the guest is paused at the end of a migration.
	Downtime time.Duration
	// Total, Processed and Left are in bytes. Total grows when memory is sent again.
	Total, Processed, Left uint64
	// Bandwidth and DirtyRate are in bytes per second.
	Bandwidth, DirtyRate uint64
	Iteration            int
}

// jobOf converts libvirt's job parameters (libvirt-domain.h, VIR_DOMAIN_JOB_*).
func jobOf(state JobState, p map[string]any) Job {
	number := func(name string) uint64 {
		switch v := p[name].(type) {
		case uint64:
			return v
		case int64:
			return uint64(max(0, v))
		}
		return 0
	}
	ms := func(name string) time.Duration {
		const longest = uint64(1<<63-1) / uint64(time.Millisecond)
		return time.Duration(min(number(name), longest)) * time.Millisecond
	}
	return Job{
		State: state, Elapsed: ms(libvirt.DomainJobTimeElapsed), Remaining: ms(libvirt.DomainJobTimeRemaining), Downtime: ms(libvirt.DomainJobDowntime),
		Total: number(libvirt.DomainJobDataTotal), Processed: number(libvirt.DomainJobDataProcessed), Left: number(libvirt.DomainJobDataRemaining),
		Bandwidth: number(libvirt.DomainJobMemoryBps),
		DirtyRate: number(libvirt.DomainJobMemoryDirtyRate) * max(number(libvirt.DomainJobMemoryPageSize), 1),
		Iteration: int(min(number(libvirt.DomainJobMemoryIteration), 1<<31)),
	}
}

// Job returns the state of a domain's job.
func (c *Client) Job(ctx context.Context, d Domain) (Job, error) {
	return do(ctx, c, c.query("domjobinfo", d.Name), func(rpc *libvirt.Libvirt) (Job, error) {
		state, raw, err := rpc.DomainGetJobStats(d.raw(), 0)
		if err != nil {
			return Job{}, err
		}
		params := map[string]any{}
		for _, p := range raw {
			switch v := p.Value.I.(type) {
			case int32:
				params[p.Field] = int64(v)
			case uint32:
				params[p.Field] = uint64(v)
			default:
				params[p.Field] = v
			}
		}
		return jobOf(JobState(state), params), nil
	})
}

// Abort aborts a domain's job. The libxl driver cannot do that: ErrUnsupported.
func (c *Client) Abort(ctx context.Context, d Domain) error {
	return c.abort(ctx, d)
}

// Migration describes a migration. It is live and peer to peer: this host's libvirtd
// connects to the destination's.
type Migration struct {
	// Destination is the URI at which this host's libvirtd reaches that of the
	// destination: xen+tls://host/system.
	Destination string
	// Data is the URI for the guest's memory, tcp://address[:port]. Empty: the
	// destination's host name.
	Data string
	// XML replaces the domain's XML on the destination. It must look the same to the
	// guest.
	XML []byte
	// PersistentXML replaces the stored definition on the destination. qemu only.
	PersistentXML []byte
	// Persist defines the domain on the destination. UndefineSource removes its
	// definition on this host.
	Persist, UndefineSource bool
	// Bandwidth limits the migration, in MiB/s. qemu only; for Xen use traffic control.
	Bandwidth uint64
	// AutoConverge slows down a guest that writes its memory too fast. qemu only.
	AutoConverge bool
	// TLS encrypts the guest's memory. qemu only.
	TLS bool
	// Unsafe skips the check that disks are shared and not cached.
	Unsafe bool
	// Limit is the time limit; zero: the client's. At its end, or when the context ends,
	// the migration is aborted if the driver can do that.
	Limit time.Duration
	// Progress is called with the job in each interval Every (default: half a second)
	// until the end.
	Progress func(Job)
	Every    time.Duration
}

// prepare returns flags and parameters of virDomainMigrateToURI3, or why the driver
// cannot do it.
func (m *Migration) prepare(driver Driver) (libvirt.DomainMigrateFlags, []libvirt.TypedParam, error) {
	flags := libvirt.MigrateLive | libvirt.MigratePeer2peer
	var params []libvirt.TypedParam
	add := func(name string, v *libvirt.TypedParamValue) {
		params = append(params, libvirt.TypedParam{Field: name, Value: *v})
	}
	u, err := url.Parse(m.Destination)
	if err != nil || u.Scheme == "" || u.Host == "" {
		return 0, nil, fmt.Errorf("%w: destination %.100q: write it as %s+tls://host/system", ErrInvalid, m.Destination, driver)
	}
	if len(m.XML) > maxString || len(m.PersistentXML) > maxString {
		return 0, nil, fmt.Errorf("%w: XML for the destination is larger than %d bytes", ErrInvalid, maxString)
	}
	if driver == Xen {
		for _, f := range []struct {
			set         bool
			name, hence string
		}{
			{m.Bandwidth != 0, "bandwidth limit", "limit it by traffic control on the migration's link"},
			{len(m.PersistentXML) != 0, "other persistent XML", "define it at the destination afterwards"},
			{m.AutoConverge, "auto-converge", "leave it out"},
			{m.TLS, "TLS for the guest's memory", "protect the migration's network"},
		} {
			if f.set {
				return 0, nil, fmt.Errorf("%w: the libxl driver has no %s; %s", ErrUnsupported, f.name, f.hence)
			}
		}
	}
	for _, f := range []struct {
		set  bool
		flag libvirt.DomainMigrateFlags
	}{
		{m.Persist, libvirt.MigratePersistDest},
		{m.UndefineSource, libvirt.MigrateUndefineSource},
		{m.AutoConverge, libvirt.MigrateAutoConverge},
		{m.TLS, libvirt.MigrateTLS},
		{m.Unsafe, libvirt.MigrateUnsafe},
	} {
		if f.set {
			flags |= f.flag
		}
	}
	if m.Data != "" {
		add(libvirt.MigrateParamURI, libvirt.NewTypedParamValueString(m.Data))
	}
	if len(m.XML) != 0 {
		add(libvirt.MigrateParamDestXML, libvirt.NewTypedParamValueString(string(m.XML)))
	}
	if len(m.PersistentXML) != 0 {
		add(libvirt.MigrateParamPersistXML, libvirt.NewTypedParamValueString(string(m.PersistentXML)))
	}
	if m.Bandwidth != 0 {
		add(libvirt.MigrateParamBandwidth, libvirt.NewTypedParamValueUllong(m.Bandwidth))
	}
	return flags, params, nil
}

// Migrate migrates a running domain to another host. It returns when the domain runs
// there. If the migration fails, libvirt lets the domain go on here. If the error wraps
// ErrUnknownOutcome, the domain may run here or there, or may be migrating. qemu's is aborted
// as at its limit if it sends nothing for much longer than those to this destination before: the error
// wraps ErrNothingSent.
func (c *Client) Migrate(ctx context.Context, d Domain, m Migration) error {
	o := op{name: "migrate", object: d.Name, limit: m.Limit, change: true, job: &d}
	if o.limit <= 0 {
		o.limit = c.limits.Migrate
	}
	flags, params, err := m.prepare(c.driver)
	if err != nil {
		return o.failed(err)
	}
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	if m.Progress != nil || c.driver == QEMU {
		following, stop := context.WithCancel(ctx)
		over := make(chan struct{})
		go func() {
			defer close(over)
			c.follow(following, d, m, abort)
		}()
		defer func() {
			stop()
			<-over
		}()
	}
	return done(ctx, c, o, func(rpc *libvirt.Libvirt) error {
		_, err := rpc.DomainMigratePerform3Params(d.raw(), libvirt.OptString{m.Destination}, params, nil, flags)
		return err
	})
}

// follow reports the progress of a migration until ctx ends, and aborts one of qemu's that
// sends nothing for long. Xen's driver can do neither: nothing that it says is a reason to give up.
// Nor are errors: they are no reason to stop a migration.
func (c *Client) follow(ctx context.Context, d Domain, m Migration, abort func(why error)) {
	every := m.Every
	if every <= 0 {
		every = time.Second / 2
	}
	quiet := silence{limit: c.silent.Limit(m.Destination), since: time.Now()}
	defer func() {
		if quiet.longest > 0 {
			c.silent.Took(m.Destination, quiet.longest)
		}
	}()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		job, err := c.Job(ctx, d)
		now := time.Now()
		switch {
		case ctx.Err() != nil, errors.Is(err, ErrUnsupported), errors.Is(err, ErrClosed):
			return
		case err != nil, job.State == NoJob:
			quiet.unseen(now)
			continue
		}
		if m.Progress != nil {
			m.Progress(job)
		}
		if c.driver == QEMU && quiet.look(job, now) {
			c.silent.Missed(m.Destination, now.Sub(quiet.since))
			quiet.longest = 0 // what came before it says less
			abort(quiet.failed(m.Destination, now))
			return
		}
	}
}

// CancelArrival ends a domain whose source failed while the domain arrived here. libxl's
// driver keeps such a domain paused and waits for the source's last message for ever.
// Meanwhile it refuses all other calls, including destroy. If the source has not even
// connected, the domain is shut off, and the driver waits at a port. This call is that message
// (virDomainMigrateFinish3Params, cancelled). If the domain runs, or has a stored definition
// and is shut off, the error wraps ErrState: it must not be ended in this way.
func (c *Client) CancelArrival(ctx context.Context, d Domain) error {
	o := c.change("cancel the arrival of", d.Name)
	state, err := c.State(ctx, d)
	stored := false
	if err == nil && !state.Active() {
		stored, err = c.Persistent(ctx, d)
	}
	if err == nil && (stored || state.Active() && state != Paused) {
		err = o.failed(fmt.Errorf("%w: it is %s", ErrState, state))
	}
	if err != nil {
		return err
	}
	name := []libvirt.TypedParam{{Field: libvirt.MigrateParamDestName, Value: *libvirt.NewTypedParamValueString(d.Name)}}
	err = done(ctx, c, o, func(rpc *libvirt.Libvirt) error {
		_, _, err := rpc.DomainMigrateFinish3Params(name, nil, uint32(libvirt.MigrateLive|libvirt.MigratePeer2peer), 1)
		return err
	})
	// libvirt returns an error if there is no domain to return, which is what is
	// expected.
	if now, look := c.State(ctx, d); errors.Is(look, ErrNotFound) || look == nil && state.Active() && !now.Active() {
		return nil
	}
	return err
}
