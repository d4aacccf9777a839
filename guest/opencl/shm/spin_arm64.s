#include "textflag.h"

// func Spin(n int)
TEXT ·Spin(SB), NOSPLIT, $0-8
	MOVD n+0(FP), R0
loop:
	SUBS $1, R0
	BLT  done
	YIELD
	B    loop
done:
	RET
