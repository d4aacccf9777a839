package pki

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"log/slog"
	"strings"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

const (
	tokenPrefix  = "gpuctl-join-v1." //nolint:gosec // what every token begins with
	maxToken     = 4 << 10           // longest text of a token
	maxAddresses = 7                 // as many as there can be voters
	maxAddress   = 255
	secretSize   = 32
	checksumSize = 4
)

// Token admits one host or user, once. Its text must be kept secret. Printing a Token by
// accident shows no secret; Encode does.
type Token struct {
	Addresses   []string          // host:port of hosts of the cluster
	Fingerprint [sha256.Size]byte // SHA-256 of the authority's certificate
	ID          string
	Secret      [secretSize]byte
	Name        string // only this host or user may use it; empty: any
	Role        clusterv1.Role
	Expires     time.Time // in whole milliseconds; for information, as the leader decides
}

// NewToken makes a token, and the record of it that the log keeps.
func NewToken(t Token, createdBy string) (Token, *clusterv1.JoinToken, error) {
	id := make([]byte, 6)
	if _, err := rand.Read(id); err != nil {
		return Token{}, nil, fmt.Errorf("join token: %w", err)
	}
	if _, err := rand.Read(t.Secret[:]); err != nil {
		return Token{}, nil, fmt.Errorf("join token: %w", err)
	}
	t.ID = "t-" + hex.EncodeToString(id)
	t.Expires = t.Expires.Truncate(time.Millisecond)
	if err := t.validate(); err != nil {
		return Token{}, nil, err
	}
	hash := sha256.Sum256(t.Secret[:])
	return t, &clusterv1.JoinToken{
		Id: t.ID, SecretHash: hash[:], Role: t.Role, Name: t.Name, ExpiresUnixMs: t.Expires.UnixMilli(), CreatedBy: createdBy,
	}, nil
}

// String returns the token's name, without its secret.
func (t Token) String() string { return "join token " + t.ID }

// GoString returns the same for %#v.
func (t Token) GoString() string { return t.String() }

// LogValue returns the token's id for slog.
func (t Token) LogValue() slog.Value { return slog.StringValue(t.ID) }

func (t Token) validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrTokenMalformed, fmt.Sprintf(format, args...))
	}
	if len(t.Addresses) == 0 || len(t.Addresses) > maxAddresses {
		return bad("%d addresses (want 1 to %d)", len(t.Addresses), maxAddresses)
	}
	for _, a := range t.Addresses {
		if err := checkAddress(a); err != nil {
			return bad("%v", err)
		}
	}
	if !ValidName(t.ID) {
		return bad("its id")
	}
	if t.Name != "" && !ValidName(t.Name) {
		return bad("name %.100q", t.Name)
	}
	switch t.Role {
	case clusterv1.Role_ROLE_VIEWER, clusterv1.Role_ROLE_OPERATOR, clusterv1.Role_ROLE_ADMIN, clusterv1.Role_ROLE_HOST:
	default:
		return bad("role %d", t.Role)
	}
	if ms := t.Expires.UnixMilli(); ms <= 0 || ms >= 1<<48 {
		return bad("its end")
	}
	return nil
}

// Encode returns the token's text, which contains the secret.
func (t Token) Encode() (string, error) {
	if err := t.validate(); err != nil {
		return "", err
	}
	b := []byte{byte(t.Role)}
	b = binary.BigEndian.AppendUint64(b, uint64(t.Expires.UnixMilli()))
	b = append(b, t.Fingerprint[:]...)
	b = append(b, t.Secret[:]...)
	b = appendString(b, t.ID)
	b = appendString(b, t.Name)
	b = append(b, byte(len(t.Addresses)))
	for _, a := range t.Addresses {
		b = appendString(b, a)
	}
	sum := sha256.Sum256(b)
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(append(b, sum[:checksumSize]...)), nil
}

func appendString(b []byte, s string) []byte { return append(append(b, byte(len(s))), s...) }

// DecodeToken parses the text of Encode. It ignores white space around it, which copying
// may add, and accepts no other deviation.
func DecodeToken(text string) (Token, error) {
	text = strings.TrimSpace(text)
	bad := func(why string) (Token, error) {
		return Token{}, fmt.Errorf("%w: %s", ErrTokenMalformed, why)
	}
	body, ok := strings.CutPrefix(text, tokenPrefix)
	switch {
	case len(text) > maxToken:
		return bad("it is too long")
	case !ok && strings.HasPrefix(text, "gpuctl-join-"):
		return bad("it is of another version of gpuctl")
	case !ok:
		return bad("it does not begin with " + tokenPrefix)
	case strings.ContainsAny(body, "\r\n"):
		return bad("it has a line break") // the base64 decoder would ignore it
	}
	data, err := base64.RawURLEncoding.Strict().DecodeString(body)
	if err != nil || len(data) < checksumSize {
		return bad("a part of it is missing or changed; copy it again")
	}
	data, check := data[:len(data)-checksumSize], data[len(data)-checksumSize:]
	if sum := sha256.Sum256(data); !bytes.Equal(sum[:checksumSize], check) {
		return bad("a part of it is missing or changed; copy it again")
	}
	r := tokenReader{data, true}
	var t Token
	t.Role = clusterv1.Role(r.byte())
	ms := binary.BigEndian.Uint64(r.take(8, 8))
	copy(t.Fingerprint[:], r.take(len(t.Fingerprint), len(t.Fingerprint)))
	copy(t.Secret[:], r.take(len(t.Secret), len(t.Secret)))
	t.ID = r.string(maxNameLength)
	t.Name = r.string(maxNameLength)
	n := int(r.byte())
	for range min(n, maxAddresses) {
		t.Addresses = append(t.Addresses, r.string(maxAddress))
	}
	if !r.ok || len(r.rest) != 0 || n > maxAddresses || ms >= 1<<48 {
		return bad("its content has another form")
	}
	t.Expires = time.UnixMilli(int64(ms))
	if err := t.validate(); err != nil {
		return Token{}, err
	}
	return t, nil
}

type tokenReader struct {
	rest []byte
	ok   bool
}

// take returns n bytes. If there are fewer, it returns zeros and sets r.ok to false.
func (r *tokenReader) take(n, limit int) []byte {
	if n > limit || n > len(r.rest) {
		r.ok = false
		return make([]byte, min(n, limit))
	}
	out := r.rest[:n]
	r.rest = r.rest[n:]
	return out
}

func (r *tokenReader) byte() byte              { return r.take(1, 1)[0] }
func (r *tokenReader) string(limit int) string { return string(r.take(int(r.byte()), limit)) }

// VerifyToken returns an error unless the holder of this secret may join under this name.
// That a token works only once is enforced by the log (UseJoinToken). Only a caller with
// the right secret gets a more detailed error.
func VerifyToken(secret []byte, stored *clusterv1.JoinToken, name string, now time.Time) error {
	hash := sha256.Sum256(secret)
	equal := subtle.ConstantTimeCompare(hash[:], stored.GetSecretHash()) == 1
	switch {
	case stored == nil:
		return fmt.Errorf("%w: it was used, was deleted, or never was; ask an administrator for a new one", ErrTokenUnknown)
	case !equal || len(secret) != secretSize:
		return fmt.Errorf("join token %s: %w; copy it again", stored.GetId(), ErrTokenSecret)
	case now.UnixMilli() >= stored.GetExpiresUnixMs():
		return fmt.Errorf("join token %s: %w on %s; ask an administrator for a new one", stored.GetId(), ErrTokenExpired, stamp(time.UnixMilli(stored.GetExpiresUnixMs())))
	case stored.GetName() != "" && stored.GetName() != name:
		return fmt.Errorf("join token %s: %w: %s, not %.64q", stored.GetId(), ErrTokenName, stored.GetName(), name)
	}
	return nil
}
