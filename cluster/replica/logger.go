package replica

import (
	"context"
	"fmt"
	"io"
	"log" //nolint:depguard // hclog.Logger names it
	"log/slog"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/gpuctl/gpuctl/cluster/pki/throttle"
)

// logger writes Raft's log to slog.
type logger struct {
	log  *slog.Logger
	name string
	with []any
	// often limits repeated lines: Raft logs a peer that does not answer several times a
	// second.
	often *throttle.Throttle
}

const repeat = 30 * time.Second

var _ hclog.Logger = (*logger)(nil)

func newLogger(l *slog.Logger) *logger {
	return &logger{log: l.With("component", "raft"), often: throttle.New(repeat, time.Now)}
}

func level(l hclog.Level) slog.Level {
	switch l {
	case hclog.Trace:
		return slog.LevelDebug - 4
	case hclog.Info:
		return slog.LevelInfo
	case hclog.Warn:
		return slog.LevelWarn
	case hclog.Error:
		return slog.LevelError
	default:
		return slog.LevelDebug
	}
}

// Log implements hclog.Logger, as do the following methods.
func (l *logger) Log(at hclog.Level, msg string, args ...any) {
	to := level(at)
	if !l.log.Enabled(context.Background(), to) {
		return
	}
	attrs := make([]slog.Attr, 0, len(args)/2+2)
	if to >= slog.LevelWarn {
		skipped, ok := l.often.Allow(kindOf(msg, args))
		if !ok {
			return
		}
		if skipped > 0 {
			attrs = append(attrs, slog.Uint64("repeated", skipped))
		}
	}
	for i := 0; i+1 < len(args); i += 2 {
		v := args[i+1]
		if f, ok := v.(hclog.Format); ok && len(f) > 0 {
			v = fmt.Sprintf(fmt.Sprint(f[0]), f[1:]...)
		}
		attrs = append(attrs, slog.Any(strings.ReplaceAll(fmt.Sprint(args[i]), "-", "_"), v))
	}
	if len(args)%2 == 1 {
		attrs = append(attrs, slog.Any("extra", args[len(args)-1]))
	}
	l.log.LogAttrs(context.Background(), to, msg, attrs...)
}

// kindOf returns the kind of a line for the limit: its text and the peer that it names.
func kindOf(msg string, args []any) string {
	for i := 0; i+1 < len(args); i += 2 {
		if key := fmt.Sprint(args[i]); key == "peer" || key == "target" {
			return msg + fmt.Sprint(args[i+1])
		}
	}
	return msg
}

func (l *logger) Trace(msg string, args ...any) { l.Log(hclog.Trace, msg, args...) }
func (l *logger) Debug(msg string, args ...any) { l.Log(hclog.Debug, msg, args...) }
func (l *logger) Info(msg string, args ...any)  { l.Log(hclog.Info, msg, args...) }
func (l *logger) Warn(msg string, args ...any)  { l.Log(hclog.Warn, msg, args...) }
func (l *logger) Error(msg string, args ...any) { l.Log(hclog.Error, msg, args...) }

func (l *logger) is(at hclog.Level) bool { return l.log.Enabled(context.Background(), level(at)) }
func (l *logger) IsTrace() bool          { return l.is(hclog.Trace) }
func (l *logger) IsDebug() bool          { return l.is(hclog.Debug) }
func (l *logger) IsInfo() bool           { return l.is(hclog.Info) }
func (l *logger) IsWarn() bool           { return l.is(hclog.Warn) }
func (l *logger) IsError() bool          { return l.is(hclog.Error) }

func (l *logger) ImpliedArgs() []any { return l.with }

func (l *logger) With(args ...any) hclog.Logger {
	keys := make([]any, len(args))
	for i, a := range args {
		if s, ok := a.(string); ok && i%2 == 0 {
			a = strings.ReplaceAll(s, "-", "_")
		}
		keys[i] = a
	}
	all := append(append([]any{}, l.with...), args...)
	return &logger{log: l.log.With(keys...), name: l.name, with: all, often: l.often}
}

func (l *logger) Name() string { return l.name }

func (l *logger) Named(name string) hclog.Logger {
	return &logger{log: l.log, name: strings.TrimPrefix(l.name+"."+name, "."), with: l.with, often: l.often}
}

func (l *logger) ResetNamed(name string) hclog.Logger {
	return &logger{log: l.log, name: name, with: l.with, often: l.often}
}

// SetLevel does nothing: the level is that of slog's handler.
func (l *logger) SetLevel(hclog.Level) {}

func (l *logger) GetLevel() hclog.Level {
	for _, at := range []hclog.Level{hclog.Trace, hclog.Debug, hclog.Info, hclog.Warn} {
		if l.is(at) {
			return at
		}
	}
	return hclog.Error
}

func (l *logger) StandardLogger(*hclog.StandardLoggerOptions) *log.Logger {
	return slog.NewLogLogger(l.log.Handler(), slog.LevelInfo)
}

func (l *logger) StandardWriter(o *hclog.StandardLoggerOptions) io.Writer {
	return l.StandardLogger(o).Writer()
}
