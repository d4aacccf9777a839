package pki

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"errors"
	"fmt"
)

const sealInfo = "gpuctl join: authority key v1"

// Seal encrypts the authority's key with a token's secret, so that programs and proxies
// that log an answer do not log the key in the clear. Each secret is used once, so no
// nonce is needed.
func Seal(secret, key []byte) ([]byte, error) {
	aead, err := sealer(secret)
	if err != nil {
		return nil, err
	}
	return aead.Seal(nil, make([]byte, aead.NonceSize()), key, nil), nil
}

// Unseal is the inverse of Seal.
func Unseal(secret, sealed []byte) ([]byte, error) {
	aead, err := sealer(secret)
	if err != nil {
		return nil, err
	}
	key, err := aead.Open(nil, make([]byte, aead.NonceSize()), sealed, nil)
	if err != nil {
		return nil, errors.New("the authority's key was sealed for another token, or is damaged")
	}
	return key, nil
}

func sealer(secret []byte) (cipher.AEAD, error) {
	if len(secret) != secretSize {
		return nil, fmt.Errorf("join token's secret has %d bytes (want %d)", len(secret), secretSize)
	}
	key, err := hkdf.Key(sha256.New, secret, nil, sealInfo, 32)
	if err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	return aead, nil
}
