package channel

import (
	"bytes"
	"slices"
	"strings"
	"testing"
)

func sample(seq uint32, payload string) *frame {
	return &frame{kind: kindData, from: fromGuest, conn: 0x1122334455667788, seq: seq, ack: 7, payload: []byte(payload)}
}

// decode feeds b in pieces of the given size.
func decode(b []byte, piece int) (frames []frame, d decoder) {
	for part := range slices.Chunk(b, piece) {
		d.feed(part, func(f frame) {
			f.payload = bytes.Clone(f.payload)
			frames = append(frames, f)
		})
	}
	return frames, d
}

func TestDecoderFindsFrames(t *testing.T) {
	one, two := sample(1, "one").appendTo(nil), sample(2, "two").appendTo(nil)
	garbled := bytes.Clone(one)
	garbled[headerSize] ^= 1
	longer := sample(1, strings.Repeat("x", maxPayload)).appendTo(nil)
	whole := sample(3, string(one)+"x").appendTo(nil)
	spoilt := bytes.Clone(whole)
	spoilt[len(spoilt)-1] ^= 1
	unknown := (&frame{kind: 99, from: fromGuest}).appendTo(nil)
	nobody := (&frame{kind: kindData, from: 'x'}).appendTo(nil)
	for _, c := range []struct {
		name string
		in   [][]byte
		want []uint32
	}{
		{"two", [][]byte{one, two}, []uint32{1, 2}},
		{"garbage between", [][]byte{one, []byte("login: \xc7gc\x01\xc7gc"), two}, []uint32{1, 2}},
		{"a spoilt payload", [][]byte{garbled, two}, []uint32{2}},
		{"half a frame, then padding", [][]byte{longer[:700], padding(), two}, []uint32{2}},
		{"half a header", [][]byte{one[:20], padding(), two}, []uint32{2}},
		{"a frame in a frame", [][]byte{whole, two}, []uint32{3, 2}},
		{"a frame in a spoilt frame", [][]byte{spoilt, two}, []uint32{1, 2}},
		{"an unknown kind", [][]byte{unknown, two}, []uint32{2}},
		{"an unknown side", [][]byte{nobody, two}, []uint32{2}},
		{"half a frame at the end", [][]byte{one, two[:len(two)-1]}, []uint32{1}},
	} {
		for _, piece := range []int{1, 7, 4095} {
			frames, d := decode(slices.Concat(c.in...), piece)
			var got []uint32
			for _, f := range frames {
				got = append(got, f.seq)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("%s, pieces of %d: frames %v, want %v", c.name, piece, got, c.want)
			}
			if len(d.buf) >= maxFrame {
				t.Errorf("%s: keeps %d bytes", c.name, len(d.buf))
			}
		}
	}
}

// A half frame must not swallow the first frame of the next client.
func TestPaddingIsLongEnough(t *testing.T) {
	longest := sample(1, strings.Repeat("x", maxPayload)).appendTo(nil)
	next := sample(2, "next").appendTo(nil)
	for cut := range longest {
		frames, _ := decode(slices.Concat(longest[:cut], padding(), next), maxFrame)
		if len(frames) != 1 || frames[0].seq != 2 {
			t.Fatalf("cut at %d: %d frames", cut, len(frames))
		}
	}
}

func FuzzDecoder(f *testing.F) {
	one := sample(1, "one").appendTo(nil)
	f.Add(one, uint8(3))
	f.Add(slices.Concat(one[:30], padding(), one), uint8(200))
	f.Add([]byte("\xc7gc\x01\x03g\xff\xff"), uint8(1))
	f.Fuzz(func(t *testing.T, data []byte, piece uint8) {
		all, _ := decode(data, max(len(data), 1))
		parts, d := decode(data, int(piece)+1)
		if len(all) != len(parts) {
			t.Fatalf("%d frames at once, %d in pieces", len(all), len(parts))
		}
		used := 0
		for i := range all {
			f := &all[i]
			if len(f.payload) > maxPayload || f.kind < kindOpen || f.kind > kindLast {
				t.Fatalf("frame %+v", f)
			}
			b := f.appendTo(nil)
			if !bytes.Contains(data, b) {
				t.Fatal("a frame that nobody sent")
			}
			used += len(b)
			if !bytes.Equal(parts[i].payload, f.payload) {
				t.Fatal("a payload changed")
			}
		}
		if used+int(d.skipped)+len(d.buf) != len(data) {
			t.Fatalf("%d bytes of frames, %d skipped, %d kept of %d", used, d.skipped, len(d.buf), len(data))
		}
		// Whatever was before it, a frame after padding is found.
		found := false
		d.feed(append(padding(), one...), func(f frame) { found = found || f.conn == 0x1122334455667788 && f.seq == 1 })
		if !found {
			t.Fatal("the frame after the padding was lost")
		}
	})
}
