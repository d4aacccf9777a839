package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"
)

// Limits for what is received.
const (
	MaxXML  = 4 << 20
	MaxText = 4 << 10 // for each other field

	maxFields = 32
	maxBody   = MaxXML + maxFields*(MaxText+fieldHeader)

	frameHeader = 8
	fieldHeader = 5
)

// magic contains the version of the frame format. Fields have no version.
const magic = "GXH1"

// ErrProtocol means that the other side does not use this protocol.
var ErrProtocol = errors.New("not the protocol of gpuctl's hook")

const (
	tagKind = 1 + iota
	tagDriver
	tagDomain
	tagOperation
	tagSub
	tagExtra
	tagXML
	tagBudget
	tagStatus
	tagMessage
	tagVersion
)

const (
	kindEvent = "event"
	kindPing  = "ping"
)

// Status is the result of a request.
type Status string

// Results of requests.
const (
	Done    Status = "done"
	Denied  Status = "denied"  // hostd refuses; the message contains why
	Late    Status = "late"    // hostd did not finish in time
	Unready Status = "unready" // hostd cannot decide now: it starts, ends or is overloaded
)

// Request is a call of the hook, or a ping, which has no event.
type Request struct {
	Ping   bool
	Event  Event
	Budget time.Duration // how long the hook waits; 0: not stated
}

// Response answers a request.
type Response struct {
	Status  Status
	Message string // for the operator
	XML     []byte
	Version string // version of the server, in the answer to a ping
}

// WriteRequest writes a request as one frame.
func WriteRequest(w io.Writer, r Request) error {
	f := frame{}
	if r.Ping {
		f.text(tagKind, kindPing)
		return f.send(w)
	}
	f.text(tagKind, kindEvent)
	f.text(tagDriver, r.Event.Driver)
	f.text(tagDomain, r.Event.Domain)
	f.text(tagOperation, r.Event.Operation)
	f.text(tagSub, r.Event.Sub)
	f.text(tagExtra, r.Event.Extra)
	f.bytes(tagXML, r.Event.XML, MaxXML)
	if ms := r.Budget.Milliseconds(); ms > 0 {
		f.bytes(tagBudget, binary.BigEndian.AppendUint64(nil, uint64(ms)), 8)
	}
	return f.send(w)
}

// ReadRequest reads a request from WriteRequest.
func ReadRequest(r io.Reader) (Request, error) {
	fields, err := receive(r)
	if err != nil {
		return Request{}, err
	}
	switch kind := string(fields[tagKind]); kind {
	case kindPing:
		return Request{Ping: true}, nil
	case kindEvent:
	default:
		return Request{}, fmt.Errorf("%w: a request of kind %.20q", ErrProtocol, kind)
	}
	req := Request{Event: Event{
		Driver: string(fields[tagDriver]), Domain: string(fields[tagDomain]), Operation: string(fields[tagOperation]),
		Sub: string(fields[tagSub]), Extra: string(fields[tagExtra]), XML: fields[tagXML],
	}}
	if b := fields[tagBudget]; len(b) == 8 {
		req.Budget = time.Duration(min(binary.BigEndian.Uint64(b), uint64(time.Hour.Milliseconds()))) * time.Millisecond
	}
	return req, nil
}

// WriteResponse writes a response as one frame. A message that is too long is shortened.
func WriteResponse(w io.Writer, r Response) error {
	f := frame{}
	f.text(tagStatus, string(r.Status))
	f.text(tagMessage, r.Message[:min(len(r.Message), MaxText)])
	f.text(tagVersion, r.Version[:min(len(r.Version), MaxText)])
	f.bytes(tagXML, r.XML, MaxXML)
	return f.send(w)
}

// ReadResponse reads a response from WriteResponse.
func ReadResponse(r io.Reader) (Response, error) {
	fields, err := receive(r)
	if err != nil {
		return Response{}, err
	}
	return Response{
		Status: Status(fields[tagStatus]), Message: string(fields[tagMessage]), Version: string(fields[tagVersion]), XML: fields[tagXML],
	}, nil
}

// frame is a body that is being built.
type frame struct {
	body []byte
	err  error
}

func (f *frame) text(tag byte, s string) { f.bytes(tag, []byte(s), MaxText) }

// bytes adds a field, unless it is empty.
func (f *frame) bytes(tag byte, value []byte, most int) {
	switch {
	case len(value) == 0:
	case len(value) > most:
		f.err = errors.Join(f.err, fmt.Errorf("a field of %d bytes, more than %d", len(value), most))
	default:
		f.body = append(f.body, tag)
		f.body = binary.BigEndian.AppendUint32(f.body, uint32(len(value)))
		f.body = append(f.body, value...)
	}
}

func (f *frame) send(w io.Writer) error {
	if f.err != nil {
		return f.err
	}
	out := make([]byte, 0, frameHeader+len(f.body))
	out = append(out, magic...)
	out = binary.BigEndian.AppendUint32(out, uint32(len(f.body)))
	_, err := w.Write(append(out, f.body...))
	return err
}

// receive reads one frame. If a field is repeated, the last one is used.
func receive(r io.Reader) (map[byte][]byte, error) {
	var header [frameHeader]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return nil, err
	}
	if string(header[:4]) != magic {
		return nil, fmt.Errorf("%w: it begins with %q", ErrProtocol, header[:4])
	}
	size := binary.BigEndian.Uint32(header[4:])
	if size > maxBody {
		return nil, fmt.Errorf("%w: a frame of %d bytes, more than %d", ErrProtocol, size, maxBody)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, err
	}
	fields := map[byte][]byte{}
	for n := 0; len(body) > 0; n++ {
		if len(body) < fieldHeader || n == maxFields {
			return nil, fmt.Errorf("%w: fields that are cut off, or too many", ErrProtocol)
		}
		tag, length := body[0], binary.BigEndian.Uint32(body[1:])
		body = body[fieldHeader:]
		most := uint32(MaxText)
		if tag == tagXML {
			most = MaxXML
		}
		if length > most || uint64(length) > uint64(len(body)) {
			return nil, fmt.Errorf("%w: field %d has %d bytes", ErrProtocol, tag, length)
		}
		fields[tag] = body[:length:length]
		body = body[length:]
	}
	return fields, nil
}
