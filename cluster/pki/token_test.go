package pki

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

func exampleToken() (Token, *clusterv1.JoinToken) {
	t, stored, err := NewToken(Token{
		Addresses: []string{"192.0.2.1:7443", "[2001:db8::1]:7443"}, Fingerprint: [32]byte{1, 2, 3},
		Role: clusterv1.Role_ROLE_HOST, Name: "node2", Expires: time.Now().Add(time.Hour),
	}, "uid:0")
	if err != nil {
		panic(err)
	}
	return t, stored
}

func TestTokensComeBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringMatching(`[a-z0-9][a-z0-9._-]{0,20}`)
		in, _, err := NewToken(Token{
			Addresses: rapid.SliceOfN(rapid.Custom(func(t *rapid.T) string {
				return fmt.Sprintf("%s:%d", name.Draw(t, "host"), rapid.IntRange(1, 65535).Draw(t, "port"))
			}), 1, maxAddresses).Draw(t, "addresses"),
			Name: rapid.OneOf(rapid.Just(""), name).Draw(t, "name"), Role: clusterv1.Role(rapid.IntRange(1, 4).Draw(t, "role")),
			Expires: time.UnixMilli(rapid.Int64Range(1, 1<<48-1).Draw(t, "expires")),
		}, "somebody")
		if err != nil {
			t.Fatal(err)
		}
		text, err := in.Encode()
		if err != nil {
			t.Fatal(err)
		}
		out, err := DecodeToken(" " + text + "\n")
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(in.Addresses, out.Addresses) || in.ID != out.ID || in.Secret != out.Secret || in.Name != out.Name || in.Role != out.Role || !in.Expires.Equal(out.Expires) || in.Fingerprint != out.Fingerprint {
			t.Fatalf("in %#v, out %#v", in, out)
		}
	})
}

func TestATokenChangedAnywhereIsRefused(t *testing.T) {
	token, _ := exampleToken()
	text, _ := token.Encode()
	for i := range len(text) {
		changed := []byte(text)
		changed[i] = 'A'
		if changed[i] == text[i] {
			changed[i] = 'B'
		}
		if _, err := DecodeToken(string(changed)); !errors.Is(err, ErrTokenMalformed) {
			t.Errorf("byte %d: %v", i, err)
		}
		if _, err := DecodeToken(text[:i]); !errors.Is(err, ErrTokenMalformed) {
			t.Errorf("cut at %d: %v", i, err)
		}
	}
	for _, bad := range []string{"", text + "A", text + "==", text + " " + text, text[:40] + "\n" + text[40:], "gpuctl-join-v2." + text[15:], strings.Repeat("A", 1<<20)} {
		if _, err := DecodeToken(bad); !errors.Is(err, ErrTokenMalformed) {
			t.Errorf("%.60q: %v", bad, err)
		}
	}
}

func TestPrintingATokenShowsNoSecret(t *testing.T) {
	token, _ := exampleToken()
	for _, s := range []string{fmt.Sprint(token), fmt.Sprintf("%v %+v %#v %s", token, token, token, token), token.LogValue().String()} {
		for _, secret := range []string{string(token.Secret[:]), fmt.Sprint(token.Secret[:3])[1:8], base64.RawURLEncoding.EncodeToString(token.Secret[:])} {
			if strings.Contains(s, secret) {
				t.Errorf("%q shows %q", s, secret)
			}
		}
	}
}

func TestVerifyToken(t *testing.T) {
	token, stored := exampleToken()
	if bytes.Contains(stored.GetSecretHash(), token.Secret[:]) || len(stored.GetSecretHash()) != 32 {
		t.Fatal("the log gets the secret")
	}
	wrong := bytes.Clone(token.Secret[:])
	wrong[31] ^= 1
	soon, late := token.Expires.Add(-time.Millisecond), token.Expires
	for name, c := range map[string]struct {
		secret []byte
		stored *clusterv1.JoinToken
		name   string
		now    time.Time
		want   error
	}{
		"good":                 {token.Secret[:], stored, "node2", soon, nil},
		"late":                 {token.Secret[:], stored, "node2", late, ErrTokenExpired},
		"other name":           {token.Secret[:], stored, "node3", soon, ErrTokenName},
		"wrong":                {wrong, stored, "node2", soon, ErrTokenSecret},
		"wrong, late":          {wrong, stored, "node3", late, ErrTokenSecret},
		"none":                 {nil, stored, "node2", soon, ErrTokenSecret},
		"used":                 {token.Secret[:], nil, "node2", soon, ErrTokenUnknown},
		"a token with no hash": {nil, &clusterv1.JoinToken{Id: "t"}, "", time.Time{}, ErrTokenSecret},
	} {
		if err := VerifyToken(c.secret, c.stored, c.name, c.now); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

func TestSeal(t *testing.T) {
	token, _ := exampleToken()
	sealed, err := Seal(token.Secret[:], []byte("the key"))
	if err != nil || bytes.Contains(sealed, []byte("the key")) {
		t.Fatal(err)
	}
	if key, err := Unseal(token.Secret[:], sealed); err != nil || string(key) != "the key" {
		t.Error(key, err)
	}
	sealed[0] ^= 1
	if _, err := Unseal(token.Secret[:], sealed); err == nil {
		t.Error("a changed one is taken")
	}
	if _, err := Seal(nil, []byte("x")); err == nil {
		t.Error("no secret is taken")
	}
}

func FuzzDecodeToken(f *testing.F) {
	token, _ := exampleToken()
	text, _ := token.Encode()
	f.Add(text)
	f.Add("gpuctl-join-v1.")
	f.Fuzz(func(t *testing.T, text string) {
		token, err := DecodeToken(text)
		if err != nil {
			if !errors.Is(err, ErrTokenMalformed) {
				t.Fatal(err)
			}
			return
		}
		// One text a token.
		if again, err := token.Encode(); err != nil || again != strings.TrimSpace(text) {
			t.Fatalf("%q becomes %q: %v", text, again, err)
		}
	})
}

// FuzzTokenBody gets past the checksum.
func FuzzTokenBody(f *testing.F) {
	token, _ := exampleToken()
	text, _ := token.Encode()
	data, _ := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(text, tokenPrefix))
	f.Add(data[:len(data)-checksumSize])
	f.Fuzz(func(t *testing.T, data []byte) {
		text := seal4(data)
		token, err := DecodeToken(text)
		if err != nil {
			if !errors.Is(err, ErrTokenMalformed) {
				t.Fatal(err)
			}
			return
		}
		if again, err := token.Encode(); err != nil || again != text {
			t.Fatalf("%q becomes %q: %v", text, again, err)
		}
	})
}

func seal4(data []byte) string {
	sum := sha256.Sum256(data)
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(append(bytes.Clone(data), sum[:checksumSize]...))
}
