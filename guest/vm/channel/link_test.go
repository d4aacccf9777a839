package channel

import (
	"bytes"
	"encoding/binary"
	"testing"
	"time"
)

// FuzzLink has a link take in whatever frames, while it is written to, read
// from and asked what to send. It holds no more than it may, sends frames of
// its own alone, and its reader gets what came in the order of its numbers.
func FuzzLink(f *testing.F) {
	step := func(b []byte, what byte, k kind, seq, ack uint32, n byte) []byte {
		b = append(b, what, byte(k))
		b = binary.BigEndian.AppendUint32(b, seq)
		b = binary.BigEndian.AppendUint32(b, ack)
		return append(b, n)
	}
	var talk []byte
	for i := range uint32(20) {
		talk = step(talk, 1, 0, 0, 0, 200)         // write
		talk = step(talk, 3, 0, 0, 0, 10)          // send
		talk = step(talk, 0, kindData, i, i/2, 50) // hear
		talk = step(talk, 2, 0, 0, 0, 99)          // read
	}
	f.Add(true, step(talk, 0, kindNak, 3, 3, 0))
	f.Add(false, append(step(nil, 0, kindOpened, 0, 0, 8), talk...))
	f.Add(false, step(step(talk, 0, kindAlive, 0, 9, 0), 0, kindClose, 0, 0, 0))
	f.Fuzz(func(t *testing.T, guest bool, in []byte) {
		from := fromHost
		if guest {
			from = fromGuest
		}
		l := newLink(7, from, 9, func() {})
		now := time.Now()
		var came, read, out []byte // in order; as read; to be sent
		next := uint32(0)
		for ; len(in) >= 11; in = in[11:] {
			what, k, seq, ack, n := in[0]%5, kind(in[1]), binary.BigEndian.Uint32(in[2:]), binary.BigEndian.Uint32(in[6:]), int(in[10])
			switch what {
			case 0:
				fr := frame{kind: k%kindLast + 1, from: from.other(), conn: 7, seq: seq, ack: ack, payload: bytes.Repeat([]byte{byte(seq)}, 8*n)}
				if n == 8 {
					fr.payload = binary.BigEndian.AppendUint64(nil, uint64(seq))
				}
				takes := fr.kind == kindData && l.opened && l.err == nil && fr.seq == next && len(l.in)+len(fr.payload) <= maxUnread
				l.handle(now, &fr)
				if takes {
					came, next = append(came, fr.payload...), next+1
				}
			case 1:
				if l.err == nil && len(l.queue) < window-1 {
					if _, err := l.Write(bytes.Repeat([]byte{1}, 8*n)); err != nil {
						t.Fatal(err)
					}
				}
			case 2:
				if len(l.in) > 0 {
					b := make([]byte, n+1)
					m, err := l.Read(b)
					if err != nil {
						t.Fatal(err)
					}
					read = append(read, b[:m]...)
				}
			case 3:
				var due time.Time
				out, due = l.fill(now, out[:0])
				if len(out) > perFill+3*maxFrame {
					t.Fatalf("%d bytes at once", len(out))
				}
				if !due.IsZero() && n%2 == 0 {
					now = due
				}
				var d decoder
				d.feed(out, func(fr frame) {
					if fr.from != from || fr.conn != 7 {
						t.Fatalf("sends %+v", fr)
					}
				})
			case 4:
				now = now.Add(time.Duration(n) * 50 * time.Millisecond)
				l.probe()
			}
			if len(l.in) > maxUnread || len(l.queue) > window || l.next > len(l.queue) || int32(l.high-l.una) < 0 || int(l.high-l.una) > len(l.queue) {
				t.Fatalf("%d unread, %d under way, next %d, numbers %d to %d", len(l.in), len(l.queue), l.next, l.una, l.high)
			}
			if l.rto < leastRTO || l.rto > mostRTO {
				t.Fatalf("sends again after %s", l.rto)
			}
		}
		if read = append(read, l.in...); !bytes.Equal(read, came) {
			t.Fatalf("%d bytes came and %d are read", len(came), len(read))
		}
	})
}
