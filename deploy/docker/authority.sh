#!/bin/sh
# Makes a certificate authority, once, and certificates that it has signed.
#
#   authority.sh AUTHORITY COORDINATOR NODES
#
# AUTHORITY     the folder that keeps the authority's key; nobody else needs it
# COORDINATOR   gets ca.pem, cert.pem and key.pem of the coordinator, whose name is $ADVERTISE (default: coordinator)
# NODES         gets ca.pem, cert.pem and key.pem that the nodes share
#
# Given again it leaves what is there. DAYS (default: 365) is how long all of it is valid.
set -eu
umask 077

authority=$1 coordinator=$2 nodes=$3
days=${DAYS:-365}

key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"; }

# sign NAME FOLDER USES: a key and a certificate for NAME in FOLDER, where the certificate comes last.
sign() {
    [ ! -e "$2/cert.pem" ] || return 0
    key "$2/key.pem"
    openssl req -new -key "$2/key.pem" -subj "/CN=$1" -out "$authority/$1.csr"
    printf '%s\n' "subjectAltName=DNS:$1" basicConstraints=critical,CA:FALSE keyUsage=critical,digitalSignature \
        "extendedKeyUsage=$3" >"$authority/$1.ext"
    openssl x509 -req -in "$authority/$1.csr" -CA "$authority/ca.pem" -CAkey "$authority/ca.key" -CAcreateserial \
        -days "$days" -extfile "$authority/$1.ext" -out "$authority/$1.pem"
    cp "$authority/ca.pem" "$2/ca.pem"
    mv "$authority/$1.pem" "$2/cert.pem"
    rm "$authority/$1.csr" "$authority/$1.ext"
}

if [ ! -e "$authority/ca.pem" ]; then
    key "$authority/ca.key"
    openssl req -x509 -new -key "$authority/ca.key" -subj "/CN=Atoll test bed" -days "$days" \
        -addext keyUsage=critical,keyCertSign,cRLSign -out "$authority/ca.new"
    mv "$authority/ca.new" "$authority/ca.pem"
fi
# The coordinator asks itself for its status, as its clients do.
sign "${ADVERTISE:-coordinator}" "$coordinator" serverAuth,clientAuth
sign node "$nodes" clientAuth
