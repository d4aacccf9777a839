package trace

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"net/url"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	api "go.opentelemetry.io/otel/trace"
)

const (
	exportTimeout = 10 * time.Second // limit for sending one batch
	retryFor      = 30 * time.Second
	batchEvery    = 5 * time.Second
	maxQueue      = 4096 // spans
	maxBatch      = 512
	quietFor      = time.Minute
	scope         = "github.com/gpuctl/gpuctl/hostd/telemetry/trace"
)

// ErrConfig is wrapped by all errors about the configuration.
var ErrConfig = errors.New("invalid tracing configuration")

// Config has the settings of a Tracer.
type Config struct {
	Endpoint    string  // host:port, or the URL of a collector (OTLP over HTTP); empty: no tracing
	Insecure    bool    // HTTP without TLS; a URL has its own scheme
	SampleRatio float64 // share of the operations that are traced, 0 to 1; 0: all
	Version     string  // version of the program
	Host        string
	Log         *slog.Logger
	// Exporter replaces the collector, for tests.
	Exporter sdk.SpanExporter
}

// Tracer makes traces. A nil one is valid and makes none.
type Tracer struct {
	provider *sdk.TracerProvider
	tracer   api.Tracer
	client   *http.Client
	end      context.CancelFunc // cancels the export in progress
}

// New returns a Tracer. Without an endpoint, it returns nil and no error. It does not
// connect. Errors wrap ErrConfig.
func New(ctx context.Context, c Config) (*Tracer, error) {
	if c.Endpoint == "" && c.Exporter == nil {
		return nil, nil
	}
	switch {
	case c.SampleRatio < 0 || c.SampleRatio > 1 || math.IsNaN(c.SampleRatio):
		return nil, fmt.Errorf("%w: sample ratio %v: want 0 to 1", ErrConfig, c.SampleRatio)
	case c.SampleRatio == 0:
		c.SampleRatio = 1
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	t := &Tracer{}
	if c.Exporter == nil {
		// Not the default client, so that its connections can be closed.
		t.client = &http.Client{Transport: &http.Transport{
			Proxy: http.ProxyFromEnvironment, MaxIdleConns: 2, IdleConnTimeout: time.Minute, TLSHandshakeTimeout: exportTimeout,
		}}
		var err error
		if c.Exporter, err = exporter(ctx, c, t.client); err != nil {
			return nil, err
		}
	}
	q := &quiet{SpanExporter: c.Exporter, log: c.Log}
	q.ctx, t.end = context.WithCancel(context.WithoutCancel(ctx))
	t.provider = sdk.NewTracerProvider(
		sdk.WithBatcher(q,
			sdk.WithBatchTimeout(batchEvery), sdk.WithExportTimeout(retryFor), sdk.WithMaxQueueSize(maxQueue), sdk.WithMaxExportBatchSize(maxBatch)),
		sdk.WithSampler(sdk.TraceIDRatioBased(c.SampleRatio)),
		sdk.WithResource(resource.NewSchemaless(
			attribute.String("service.name", "gpuctl-hostd"), attribute.String("service.version", c.Version), attribute.String("host.name", c.Host),
		)),
	)
	t.tracer = t.provider.Tracer(scope)
	return t, nil
}

func exporter(ctx context.Context, c Config, client *http.Client) (sdk.SpanExporter, error) {
	where, err := endpoint(c)
	if err != nil {
		return nil, err
	}
	e, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(where), otlptracehttp.WithHTTPClient(client),
		otlptracehttp.WithTimeout(exportTimeout), otlptracehttp.WithCompression(otlptracehttp.GzipCompression),
		otlptracehttp.WithRetry(otlptracehttp.RetryConfig{Enabled: true, InitialInterval: time.Second, MaxInterval: 10 * time.Second, MaxElapsedTime: retryFor}))
	if err != nil {
		return nil, fmt.Errorf("%w: endpoint %q: %w", ErrConfig, c.Endpoint, err)
	}
	return e, nil
}

// endpoint returns the URL of the collector.
func endpoint(c Config) (string, error) {
	where := c.Endpoint
	if u, err := url.Parse(where); err != nil || u.Host == "" {
		scheme := "https://"
		if c.Insecure {
			scheme = "http://"
		}
		where = scheme + where
	}
	u, err := url.Parse(where)
	switch {
	case err != nil:
		return "", fmt.Errorf("%w: endpoint %q: %w", ErrConfig, c.Endpoint, err)
	case u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil:
		return "", fmt.Errorf("%w: endpoint %q: want host:port, or a URL of http or https", ErrConfig, c.Endpoint)
	}
	if u.Path == "" || u.Path == "/" {
		u.Path = "/v1/traces"
	}
	return u.String(), nil
}

// Shutdown sends the spans that are queued, until ctx ends.
func (t *Tracer) Shutdown(ctx context.Context) error {
	if t == nil {
		return nil
	}
	err := t.provider.Shutdown(ctx)
	t.end() // the library would go on with the next batches
	if t.client != nil {
		t.client.CloseIdleConnections()
	}
	if err != nil {
		return fmt.Errorf("traces: %w", err)
	}
	return nil
}

// quiet limits how often failures of the collector are logged. By itself, the library
// prints one for each batch.
type quiet struct {
	sdk.SpanExporter
	ctx context.Context // its end cancels the export in progress
	log *slog.Logger

	mu   sync.Mutex
	said time.Time
	lost int // spans that were lost since the last line in the log
}

// ExportSpans always returns nil, because the caller could not do anything about an
// error.
func (q *quiet) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	if q.ctx.Err() != nil {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(q.ctx, cancel)()
	err := q.SpanExporter.ExportSpans(ctx, spans)
	if err == nil || q.ctx.Err() != nil {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.lost += len(spans)
	if q.said.IsZero() || time.Since(q.said) >= quietFor {
		q.log.Warn("traces cannot be sent", "err", err, "spans", q.lost)
		q.said, q.lost = time.Now(), 0
	}
	return nil
}
