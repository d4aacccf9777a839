package metrics

import (
	"context"
	"time"

	"connectrpc.com/connect"
)

// Interceptor counts the calls of the API. It goes before the others, so that
// what those refuse is counted as an answer, too.
func (m *Metrics) Interceptor() connect.Interceptor { return interceptor{m} }

type interceptor struct{ m *Metrics }

// WrapUnary counts a call and its time.
func (i interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if i.m == nil || req.Spec().IsClient {
			return next(ctx, req)
		}
		began := time.Now()
		res, err := next(ctx, req)
		procedure := i.m.procedure(req.Spec().Procedure)
		i.m.took.WithLabelValues(procedure).Observe(time.Since(began).Seconds())
		i.m.requests.WithLabelValues(procedure, code(err)).Inc()
		return res, err
	}
}

// WrapStreamingClient changes nothing.
func (i interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler counts a stream while it is open and when it ended. How
// long it was open says nothing.
func (i interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) (err error) {
		if i.m == nil {
			return next(ctx, conn)
		}
		procedure := i.m.procedure(conn.Spec().Procedure)
		open := i.m.streams.WithLabelValues(procedure)
		open.Inc()
		defer open.Dec()
		err = next(ctx, conn)
		i.m.requests.WithLabelValues(procedure, code(err)).Inc()
		return err
	}
}

func code(err error) string {
	if err == nil {
		return "ok"
	}
	return connect.CodeOf(err).String()
}
