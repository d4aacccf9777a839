package pki

import (
	"errors"

	"github.com/gpuctl/gpuctl/internal/reason"
)

// Why a certificate is not accepted. Errors that wrap these contain what to do.
var (
	ErrNoCertificate = errors.New("no certificate")
	ErrExpired       = errors.New("certificate has expired")
	ErrNotYetValid   = errors.New("certificate is not valid yet")
	ErrWrongCluster  = errors.New("certificate is of another cluster")
	ErrUntrusted     = errors.New("certificate is not from this cluster's authority")
	ErrRevoked       = errors.New("identity has been removed from the cluster")
	ErrNotHost       = errors.New("certificate is not a host's")
	ErrWrongHost     = errors.New("another host answered")
	ErrMalformed     = errors.New("certificate names no identity")
)

// Why a certificate cannot be signed.
var (
	ErrRequest  = reason.New(reason.Invalid, "unusable certificate request")
	ErrIdentity = reason.New(reason.Invalid, "unusable identity")
)

// Why files cannot be used.
var (
	ErrPermissions = errors.New("key can be read by others")
	ErrDamaged     = errors.New("damaged file")
	ErrMismatch    = errors.New("files do not belong together")
)

// Why a join token is refused.
var (
	ErrTokenMalformed = reason.New(reason.TokenMalformed, "not a join token")
	ErrTokenUnknown   = reason.New(reason.TokenRejected, "join token is not known")
	ErrTokenExpired   = reason.New(reason.TokenRejected, "join token has expired")
	ErrTokenSecret    = reason.New(reason.TokenRejected, "join token's secret is wrong")
	ErrTokenName      = reason.New(reason.TokenRejected, "join token is for another name")
)
