#!/bin/sh
# /etc/lab.rc: start what systemd starts in a real VM, and start it again when it
# ends, as its unit says. Sessions are gpuguest's children and outlive it.
mkdir -p /run/gpuctl-guest
chmod 755 /run/gpuctl-guest
# The unit has StateDirectory=gpuguest.
mkdir -p /var/lib/gpuguest
while :; do
	/usr/bin/gpuguest serve --vm --config /etc/gpuctl/gpuguest.yaml >>/var/log/gpuguest.log 2>&1 &
	echo $! >/run/gpuguest.pid
	wait $!
	echo "gpuguest ended with $?" >>/var/log/gpuguest.log
	sleep 1
done
