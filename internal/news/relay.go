package news

import "context"

// relayRoom is how many values a reader may be behind before it misses values.
const relayRoom = 64

// Relay passes values from one sender to one reader.
type Relay[T any] struct {
	values chan T
	last   chan T
}

// NewRelay returns an empty relay.
func NewRelay[T any]() *Relay[T] {
	return &Relay[T]{make(chan T, relayRoom), make(chan T, 1)}
}

// Tell passes a value to the reader. A reader that is too far behind misses it.
func (r *Relay[T]) Tell(v T) {
	select {
	case r.values <- v:
	default:
	}
}

// End passes the last value to the reader, which does not miss it. No other method for
// sending may be called afterwards.
func (r *Relay[T]) End(v T) {
	r.last <- v
	r.Close()
}

// Close ends the values without a last one. No other method for sending may be called
// afterwards.
func (r *Relay[T]) Close() { close(r.values) }

// Send calls send for each value until the end. If send returns an error, Send returns it
// at once. If ctx ends, it returns nil, because the operation goes on without a reader.
func (r *Relay[T]) Send(ctx context.Context, send func(T) error) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case v, ok := <-r.values:
			if ok {
				if err := send(v); err != nil {
					return err
				}
				continue
			}
			select {
			case v = <-r.last:
				return send(v)
			default:
				return nil
			}
		}
	}
}
