"""Better orders of SEND and RECV on in-order queues."""
