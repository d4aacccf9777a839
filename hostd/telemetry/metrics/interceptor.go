package metrics

import (
	"context"
	"time"

	"connectrpc.com/connect"
)

// Interceptor returns an interceptor that counts the calls of the API. It must be the
// first one, so that refusals by the others are counted as answers, too.
func (c *Counters) Interceptor() connect.Interceptor { return interceptor{c} }

type interceptor struct{ c *Counters }

// WrapUnary counts a call and its time.
func (i interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if i.c == nil || req.Spec().IsClient {
			return next(ctx, req)
		}
		began := time.Now()
		res, err := next(ctx, req)
		procedure := i.c.procedure(req.Spec().Procedure)
		i.c.took.WithLabelValues(procedure).Observe(time.Since(began).Seconds())
		i.c.requests.WithLabelValues(procedure, code(err)).Inc()
		return res, err
	}
}

// WrapStreamingClient returns next unchanged.
func (i interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler counts streams that are open and that have ended. Their duration
// is not measured, because the client decides it.
func (i interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) (err error) {
		if i.c == nil {
			return next(ctx, conn)
		}
		procedure := i.c.procedure(conn.Spec().Procedure)
		open := i.c.streams.WithLabelValues(procedure)
		open.Inc()
		defer open.Dec()
		err = next(ctx, conn)
		i.c.requests.WithLabelValues(procedure, code(err)).Inc()
		return err
	}
}

func code(err error) string {
	if err == nil {
		return "ok"
	}
	return connect.CodeOf(err).String()
}
