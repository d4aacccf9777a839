package wait

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestForEndsWithItsContext(t *testing.T) {
	if err := For(t.Context(), time.Nanosecond); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("why")
	cancel(why)
	if err := For(ctx, time.Hour); !errors.Is(err, why) {
		t.Fatalf("a wait that was given up returned %v", err)
	}
}
