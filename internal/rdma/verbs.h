// A stream of bytes over a reliable connection of RDMA: messages with a header, into buffers
// that the other end has said are free. Functions return 0 or more, or -errno. Those of one
// connection are called one at a time.
#ifndef GPUCTL_RDMA_VERBS_H
#define GPUCTL_RDMA_VERBS_H

#include <stddef.h>
#include <stdint.h>

typedef struct rxConn rxConn;
typedef struct rxListener rxListener;

// rxLoad loads the libraries. It returns 0, or -1 and why.
int rxLoad(char *why, size_t len);
// rxDevices returns how many devices there are.
int rxDevices(void);

// rxDial connects. It gives up after some milliseconds.
int rxDial(const void *addr, int ms, rxConn **out);
int rxListen(const void *addr, int backlog, rxListener **out);
// rxListenerFd is readable when there may be a connection.
int rxListenerFd(rxListener *l);
// rxTake returns a connection that is to be finished, or -EAGAIN, or what is wrong with the listener.
int rxTake(rxListener *l, rxConn **out);
// rxFinish gives up after some milliseconds, and when the descriptor stop is readable.
int rxFinish(rxConn *c, int ms, int stop);
void rxUnlisten(rxListener *l);

// rxFd is readable when rxTurn has something to do.
int rxFd(rxConn *c);
// rxCmFd is readable when the connection may have ended: rxEvents looks.
int rxCmFd(rxConn *c);
int rxTurn(rxConn *c);
int rxEvents(rxConn *c);
// rxRecv returns 0 at the end, or -EAGAIN.
int64_t rxRecv(rxConn *c, void *to, size_t n);
int64_t rxSend(rxConn *c, const void *from, size_t n);
// rxEnd says that nothing follows: 0, or -EAGAIN. rxIdle returns whether all that was sent has arrived.
int rxEnd(rxConn *c);
int rxIdle(rxConn *c);
void rxFree(rxConn *c);
// rxName copies 28 bytes.
void rxName(rxConn *c, int peer, void *addr);
void rxListenerName(rxListener *l, void *addr);

#endif
