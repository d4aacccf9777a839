package news

import "context"

// relayRoom is how many values a reader may be behind before it misses some.
const relayRoom = 64

// Relay carries values from where something happens to one reader.
type Relay[T any] struct {
	values chan T
	last   chan T
}

// NewRelay returns a relay without values.
func NewRelay[T any]() *Relay[T] {
	return &Relay[T]{make(chan T, relayRoom), make(chan T, 1)}
}

// Tell hands a value to the reader, who misses it when too far behind.
func (r *Relay[T]) Tell(v T) {
	select {
	case r.values <- v:
	default:
	}
}

// End hands the last value to the reader, who does not miss it. Nothing may be
// told after it.
func (r *Relay[T]) End(v T) {
	r.last <- v
	r.Close()
}

// Close says that there are no more values. Nothing may be told after it.
func (r *Relay[T]) Close() { close(r.values) }

// Send calls send for each value until there are no more. It returns send's
// error at once, and nil when ctx ends: what is told of goes on without a reader.
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
