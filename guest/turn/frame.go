package turn

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// Kind is what a frame says.
type Kind uint32

// The frames. Ask, End, Withdraw, Keeps and Begin come from executors, the others from gpuguest.
const (
	// Hello is the first frame. Number is the device, counted among those of the
	// executor's runtime that it was given. What is [HelloKeeps] if Keeps may be sent.
	Hello Kind = 1
	// Free lets the executor launch as it likes. All that it has asked for is forgotten.
	Free Kind = 2
	// Share begins an epoch in which the executor launches in turns only. What runs at that time
	// is turn 0; its end is reported, if need be at once.
	Share Kind = 3
	// Grant gives the turn that was asked for by that Number.
	Grant Kind = 4
	// Lapse takes a turn back that lasted too long. Its end is still to be reported.
	Lapse Kind = 5
	// Offer lets turn Number, the next one, begin without being asked for, until Revoke or
	// another epoch comes. It is sent to executors that have said that they understand it.
	Offer Kind = 6
	// Revoke takes that back. A turn that has begun meanwhile goes on, as one that was taken back.
	Revoke Kind = 7

	// Ask asks for turn Number, one higher than before or more. What is the kind of
	// command, Name its name. An executor has one turn at a time, or has asked for one.
	Ask Kind = 16
	// End reports that all that was launched in turn Number has ended. What is [EndOffers] if
	// the executor understands Offer and Revoke.
	End Kind = 17
	// Withdraw takes back what was asked for. If the grant is under way, that turn has ended.
	Withdraw Kind = 18
	// Keeps answers a Lapse: Name is the command that keeps turn Number, which need not be
	// the one that it was asked for. It is sent once a turn at most.
	Keeps Kind = 19
	// Begin reports that turn Number, which was offered, has begun. What and Name are those of an
	// Ask. The turn may have been asked for as well: then the grant is under way.
	Begin Kind = 20
)

// What of frames by which one side says what it understands: the other may be older.
const (
	HelloKeeps = 1 // of a Hello, from a gpuguest that understands Keeps
	EndOffers  = 1 // of an End, from an executor that understands Offer and Revoke
)

func (k Kind) String() string {
	switch k {
	case Hello:
		return "hello"
	case Free:
		return "free"
	case Share:
		return "share"
	case Grant:
		return "grant"
	case Lapse:
		return "lapse"
	case Offer:
		return "offer"
	case Revoke:
		return "revoke"
	case Ask:
		return "ask"
	case End:
		return "end"
	case Withdraw:
		return "withdraw"
	case Keeps:
		return "keeps"
	case Begin:
		return "begin"
	}
	return fmt.Sprintf("kind %d", uint32(k))
}

// Frame is one message. Little-endian: kind and epoch of 4 bytes each, number and what of
// 8 bytes each, and the name, filled up with zeros.
type Frame struct {
	Kind   Kind
	Epoch  uint32 // counts Share and Free; a frame of an earlier epoch means nothing any more
	Number uint64
	What   uint64
	Name   string // at most NameSize bytes
}

// Sizes in bytes.
const (
	FrameSize = 64
	NameSize  = FrameSize - nameAt
	nameAt    = 24
)

// ErrFrame is returned for bytes that are no frame.
var ErrFrame = errors.New("not a frame of a turn")

// Encode returns the frame's bytes. Of a name that is too long, the beginning is sent.
func (f Frame) Encode() (b [FrameSize]byte) {
	binary.LittleEndian.PutUint32(b[0:], uint32(f.Kind))
	binary.LittleEndian.PutUint32(b[4:], f.Epoch)
	binary.LittleEndian.PutUint64(b[8:], f.Number)
	binary.LittleEndian.PutUint64(b[16:], f.What)
	copy(b[nameAt:], f.Name)
	return b
}

// Decode reads a frame. Of the name it keeps what can be shown to people.
func Decode(b *[FrameSize]byte) (Frame, error) {
	f := Frame{
		Kind: Kind(binary.LittleEndian.Uint32(b[0:])), Epoch: binary.LittleEndian.Uint32(b[4:]),
		Number: binary.LittleEndian.Uint64(b[8:]), What: binary.LittleEndian.Uint64(b[16:]),
	}
	switch f.Kind {
	case Hello, Free, Share, Grant, Lapse, Offer, Revoke, Ask, End, Withdraw, Keeps, Begin:
	default:
		return Frame{}, fmt.Errorf("%v: %w", f.Kind, ErrFrame)
	}
	if name, _, _ := bytes.Cut(b[nameAt:], []byte{0}); len(name) > 0 {
		f.Name = strings.Map(func(r rune) rune {
			if r <= ' ' || r >= 0x7f {
				return '?'
			}
			return r
		}, string(name))
	}
	return f, nil
}
